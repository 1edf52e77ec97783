"""Held-out loss and cloze benchmarks."""
