"""Compiled programs, kept from one process to the next: the runs of a sweep compile what they share once."""

import hashlib
import os
import platform
from pathlib import Path

import jax

from grlab.data import prepared


def keep() -> None:
    """Lets JAX keep what took a second or more to compile in ~/.cache/grlab, and look there first.

    Whoever sets JAX_COMPILATION_CACHE_DIR has it there, or nowhere where it is empty. A program for a CPU is of the
    instructions that one has, so each kind of CPU has a folder of its own: a home directory may be that of many.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(prepared.root(None) / "compiled" / _cpu()))


def _cpu() -> str:
    """A name for this kind of CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    kind = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return f"{platform.machine()}-{hashlib.sha256(' '.join(kind).encode()).hexdigest()[:8]}"
