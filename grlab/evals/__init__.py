"""Held-out loss, cloze benchmarks made from held-out files, and the benchmarks of the field."""
