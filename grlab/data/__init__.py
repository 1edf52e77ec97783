"""Corpora (`corpus.load`) and their batches (`batches.train_batches`, `batches.heldout_windows`)."""
