"""Tokenizer files trained on the spot: of the package tokenizers and of SentencePiece, a few hundred ids each."""

import io
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

TEXT = [f"document {i}: the quick brown fox number {i} jumps over the lazy dog and the hound\n" for i in range(40)]


def bpe(file: Path, end: str | None = "<|endoftext|>", special: bool = True, change=lambda tokenizer: None) -> Path:
    """Writes a byte-level BPE that has every byte, and `end` as a token; `change(tokenizer)` may alter it before."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    if end:
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([AddedToken(end)])
    change(tokenizer)
    tokenizer.save(str(file))
    return file


def words(file: Path, vocab: dict[str, int]) -> Path:
    """Writes a tokenizer whose tokens are whole words."""
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(file))
    return file


def sentencepieces(file: Path, **options) -> Path:
    """Writes a SentencePiece BPE that falls back to bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    file.write_bytes(model.getvalue())
    return file
