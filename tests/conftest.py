"""What every test runs under."""

import os
import signal

# The tests compile hundreds of small programs and run each once: compiling without optimisation halves their time.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["WANDB_MODE"] = "offline"

# A background job of a script starts with SIGINT ignored, and what is ignored at the start stays so in grlab.
for _signum, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _handler)
