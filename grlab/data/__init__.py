"""Corpora (`corpus.load`) and their batches (`batches.train_batches`, `batches.heldout_windows`). Tokens are bytes."""

VOCAB_SIZE = 256
SEPARATOR = 0  # NUL, which no document holds, follows every document
