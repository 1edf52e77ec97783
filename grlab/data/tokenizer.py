"""Tokenizers: bytes, or one read from a file of the package tokenizers (`*.json`) or of SentencePiece (`*.model`).

Documents are encoded as plain text: what spells a special token in a document becomes ordinary tokens.

How many bytes of text a token stands for: a document's bytes are dealt out to its tokens in order. A character that is
split over several tokens counts with the last of them, and text that no token covers, such as dropped spaces, with the
token after it, at the end of the document with the last one. So the bytes of the tokens sum to the document's. A
tokenizer that loses text (unknown characters, normal forms) is thereby credited with text that nobody has to predict.
"""

import hashlib
import importlib
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from grlab.errors import UsageError, first_line

# What ends a document in the vocabularies of GPT-2 and Qwen, Llama 3, DeepSeek, Llama 2 and T5, and Gemma.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer.

    `encode` and `encode_counted` raise UnicodeDecodeError for a text that the tokenizer cannot have.
    """

    vocab_size: int  # one more than the largest id
    separator: int  # the id that follows every document
    fingerprint: str  # hex sha256 of the file's content; "" for bytes, which have no file
    unfit: str  # what is wrong with the documents that cannot be had, as "... hold a NUL byte"

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of `text`, [tokens], in the smallest unsigned dtype that holds the vocabulary."""

    def encode_counted(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        """The ids of `text` and the bytes of it that each stands for, both [tokens]."""


class Bytes:
    """Each byte is a token. The separator is NUL, which no text holds."""

    vocab_size = 256
    separator = 0
    fingerprint = ""
    unfit = "hold a NUL byte"

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def encode_counted(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        return self.encode(text), np.ones(len(text), np.uint8)


class _FromFile:
    """A tokenizer of a file. Subclasses give the ids of a text, and where in it, in bytes, each token lies."""

    unfit = "are not UTF-8 or hold the separator"
    vocab_size: int
    separator: int
    fingerprint: str

    def encode(self, text: bytes) -> np.ndarray:
        return np.array(self._ids(text.decode()), self._dtype)

    def encode_counted(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        ids, (starts_N, ends_N) = self._spans(text.decode())
        covered_N = np.minimum(ends_N, np.append(starts_N[1:], len(text)))
        covered_N[-1:] = len(text)
        bytes_N = np.diff(np.maximum.accumulate(covered_N), prepend=0)
        return np.array(ids, self._dtype), bytes_N.astype(np.uint32)

    @property
    def _dtype(self) -> np.dtype:
        return np.min_scalar_type(self.vocab_size - 1)


class Json(_FromFile):
    """A JSON of the package tokenizers. The separator is the first of END_OF_TEXT that it has."""

    package = "tokenizers"
    no_separator = f"has none of {' '.join(END_OF_TEXT)}: add the token that ends a document"

    def __init__(self, content: bytes, package: ModuleType):
        self._tokenizer = package.Tokenizer.from_str(content.decode())
        self._tokenizer.no_truncation()  # a file may ask for both
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        self.separator = next((ids[name] for name in END_OF_TEXT if name in ids), -1)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _spans(self, text: str) -> tuple[list[int], np.ndarray]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)  # bytes a character, in UTF-8
        byte_at = np.concatenate([[0], np.cumsum(widths)])
        return encoding.ids, byte_at[np.array(encoding.offsets, int).reshape(-1, 2).T]


class SentencePiece(_FromFile):
    """A SentencePiece model. The separator is its end of sentence."""

    package = "sentencepiece"
    no_separator = "has no end of sentence (eos_id is -1): train it with one"

    def __init__(self, content: bytes, package: ModuleType):
        self._processor = package.SentencePieceProcessor(model_proto=content)
        self.vocab_size = self._processor.vocab_size()
        self.separator = self._processor.eos_id()

    def _ids(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _spans(self, text: str) -> tuple[list[int], np.ndarray]:
        got = self._processor.encode(text, return_type="offset_mapping", return_bytes=True)
        return got["ids"], np.array(got["offsets"], int).reshape(-1, 2).T


_KINDS = {".json": Json, ".model": SentencePiece}


def load(path: str | None) -> Tokenizer:
    """The tokenizer in the file at `path`; bytes without one.

    Raises UsageError for a file that is missing or holds no tokenizer, a missing package, and a missing separator.
    """
    if not path:
        return Bytes()
    file = Path(path).expanduser()
    if file.suffix not in _KINDS:
        remedy = "must be *.json (of the package tokenizers) or *.model (of SentencePiece)"
        raise UsageError("data.tokenizer", path, remedy)
    kind = _KINDS[file.suffix]
    try:
        content = file.read_bytes()
    except OSError as e:
        raise UsageError("data.tokenizer", path, f"cannot be read: {e.strerror}") from e
    if not content:
        raise UsageError("data.tokenizer", path, "is empty")
    try:
        package = importlib.import_module(kind.package)
    except ImportError:
        remedy = f"needs the package {kind.package}: pip install {kind.package}"
        raise UsageError("data.tokenizer", path, remedy) from None
    try:
        tokenizer = kind(content, package)
    except Exception as e:  # the packages raise no class of their own
        remedy = f"the package {kind.package} cannot read it ({first_line(e)})"
        raise UsageError("data.tokenizer", path, remedy) from e
    if tokenizer.separator < 0:
        raise UsageError("data.tokenizer", path, kind.no_separator)
    tokenizer.fingerprint = hashlib.sha256(content).hexdigest()
    return tokenizer
