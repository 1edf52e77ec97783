"""What every test runs under."""

import importlib.metadata
import os
import signal
import tempfile

import pytest

# The tests compile hundreds of small programs and run each once. Without optimisation, and with XLA's older emitters,
# that takes a quarter of the time. XLA stops at a flag that it does not know, so the flag is for the pinned version.
_FLAGS = ["--xla_backend_optimization_level=0"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["WANDB_MODE"] = "offline"
# A run, its resumption and its repetition in another process compile the same programs: once is enough. A cache of this
# process and its children, so that none is read while it is written.
_CACHE = tempfile.TemporaryDirectory(prefix="grlab-tests-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

# A background job of a script starts with SIGINT ignored, and what is ignored at the start stays so in grlab.
for _signum, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _handler)


@pytest.fixture(autouse=True, scope="module")
def _programs_are_forgotten():
    """After each file: a process of them all would keep ten GB of compiled programs."""
    yield
    import jax  # by now it has been told of the flags above

    jax.clear_caches()
