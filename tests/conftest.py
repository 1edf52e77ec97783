"""What every test runs under."""

import os

# The tests compile hundreds of small programs and run each once: compiling without optimisation halves their time.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["WANDB_MODE"] = "offline"
