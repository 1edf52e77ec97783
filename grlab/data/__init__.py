"""Corpora (`corpus.load`), their tokenizers, and their batches (`batches.train_batches`, `batches.heldout_windows`)."""
