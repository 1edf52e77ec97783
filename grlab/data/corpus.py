"""A corpus: the training tokens as one flat array, and the held-out documents."""

import dataclasses
import hashlib
import logging
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds

from grlab.data import prepared, text_files
from grlab.data import tokenizer as tokenizers
from grlab.data.tokenizer import Tokenizer
from grlab.errors import UsageError, positive, unknown

FILE_CORPORA = ("stdlib", "folder")

# A TFDS split of fewer documents than this (tiny_shakespeare has one) cannot be divided by document: its documents are
# cut, each piece ending with the line that takes it to this many bytes.
_FEW_DOCUMENTS = 100
_PIECE_BYTES = 4096

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """What `load` returns; two corpora with one fingerprint give the same batches and the same held-out tokens.

    Tokens are of the smallest unsigned dtype that holds the tokenizer's vocabulary: of bytes uint8.
    """

    name: str
    fingerprint: str  # hex sha256 over the training tokens, the held-out documents, in order, and the tokenizer's file
    tokenizer: Tokenizer
    train: np.ndarray  # [tokens]: every training document followed by the separator
    heldout: list[np.ndarray]  # [tokens] each, without separator; any prefix is a fair sample
    heldout_bytes: list[np.ndarray]  # of each held-out document the bytes that each token stands for

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def separator(self) -> int:
        return self.tokenizer.separator


def load(data) -> Corpus:
    """The corpus that `data` (the fields of `config.data`) names, prepared first if it has not been before.

    The tokens are kept on disk beside the prepared datasets and mapped into memory, so that loading again costs no
    more than checking that the source is the same. Reading stops with the training document that reaches
    `data.max_bytes` of text, whatever the tokenizer. Raises UsageError for whatever the fields ask that cannot be had.
    """
    if not 0 < data.heldout < 1:
        raise UsageError("data.heldout", data.heldout, "a fraction between 0 and 1")
    positive("data.max_bytes", data.max_bytes)
    root = prepared.root(data.dir)
    tokenizer = tokenizers.load(data.tokenizer)

    if data.name in FILE_CORPORA:
        if data.name == "stdlib":
            files = text_files.stdlib(data.heldout)
        else:
            files = text_files.folder(data.path, data.glob, data.heldout)
        source, documents = [files.fingerprint], _file_documents(data.name, files, root)
    else:
        builder = prepared.builder(data.name, root, field="data.name", others=FILE_CORPORA)
        source, documents = _tfds_source(builder, data), _tfds_documents(builder, data)

    parts = [data.name, *source, data.max_bytes, *filter(None, [tokenizer.fingerprint])]
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    folder = root / "tokens" / f"{data.name.replace('/', '-')}-{key}"
    if not folder.exists():
        train, heldout = _read(documents, data.max_bytes, tokenizer)
        text_files.check_split(train.documents, len(heldout), data.heldout)
        _save(folder, train.tokens, heldout, tokenizer)
    train, heldout = (np.load(folder / f"{split}.npy", mmap_mode="r") for split in ("train", "heldout"))
    if tokenizer.fingerprint:
        token_bytes = np.load(folder / "heldout_bytes.npy", mmap_mode="r")
    else:
        token_bytes = np.broadcast_to(np.uint8(1), heldout.shape)
    ends = np.flatnonzero(heldout == tokenizer.separator)
    starts = np.concatenate([[0], ends[:-1] + 1])
    spans = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
    return Corpus(
        name=data.name,
        fingerprint=(folder / "fingerprint").read_text(),
        tokenizer=tokenizer,
        train=train,
        heldout=[heldout[span] for span in spans],
        heldout_bytes=[token_bytes[span] for span in spans],
    )


class _Train(NamedTuple):
    tokens: bytearray  # of the corpus's dtype
    documents: int


class _Heldout(NamedTuple):
    digest: bytes  # of the text: an order that means nothing
    tokens: np.ndarray
    token_bytes: np.ndarray


def _read(
    documents: Iterable[tuple[bytes, bool]], max_bytes: int, tokenizer: Tokenizer
) -> tuple[_Train, list[_Heldout]]:
    """The training tokens, each document followed by the separator, and the held-out documents by their digests."""
    train, heldout, text_bytes, count, unfit = bytearray(), [], 0, 0, 0
    for text, is_heldout in documents:
        try:
            tokens, token_bytes = tokenizer.encode_counted(text) if is_heldout else (tokenizer.encode(text), None)
        except UnicodeDecodeError:
            unfit += 1
            continue
        if tokenizer.separator in tokens:
            unfit += 1
        elif len(tokens) and is_heldout:
            heldout.append(_Heldout(hashlib.sha256(text).digest(), tokens, token_bytes))
        elif len(tokens):
            train += _ended(tokens, tokenizer.separator).tobytes()
            count += 1
            text_bytes += len(text) + 1
            if text_bytes >= max_bytes:
                break
    if unfit:
        _log.warning("%d documents %s and were left out", unfit, tokenizer.unfit)
    return _Train(train, count), sorted(heldout, key=lambda document: document.digest)


def _ended(values: np.ndarray, end: int) -> np.ndarray:
    return np.append(values, values.dtype.type(end))


def _save(folder: Path, train: bytearray, heldout: list[_Heldout], tokenizer: Tokenizer) -> None:
    """Writes the tokens to a folder of its own and renames it: never seen half written, and the first of two stays."""
    flat = np.concatenate([_ended(document.tokens, tokenizer.separator) for document in heldout])
    sha = hashlib.sha256(len(train).to_bytes(8, "big"))
    sha.update(train)
    sha.update(flat)
    sha.update(tokenizer.fingerprint.encode())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="incomplete-", ignore_cleanup_errors=True) as tmp:
            new = Path(tmp, "tokens")
            new.mkdir()
            np.save(new / "train.npy", np.frombuffer(train, flat.dtype))
            np.save(new / "heldout.npy", flat)
            if tokenizer.fingerprint:
                token_bytes = np.concatenate([_ended(document.token_bytes, 0) for document in heldout])
                np.save(new / "heldout_bytes.npy", token_bytes)
            (new / "fingerprint").write_text(sha.hexdigest())
            new.rename(folder)
    except OSError as e:
        if not folder.exists():
            raise UsageError("data.dir", str(folder.parent.parent), f"the tokens cannot be written there: {e}") from e


def _file_documents(name: str, files: text_files.FileList, root: Path) -> Iterator[tuple[bytes, bool]]:
    builder = text_files.prepare(name, files, root)
    for split in ("heldout", "train"):
        for document in builder.as_data_source(split):
            yield document["text"], split == "heldout"


def _tfds_source(builder: tfds.core.DatasetBuilder, data) -> list:
    """What tells this reading of the dataset from any other: the fields that shape it, and the files it reads."""
    stats = [(path.name, path.stat()) for path in sorted(builder.data_path.iterdir())]
    files = [(name, stat.length, stat.mtime) for name, stat in stats]
    return [builder.info.full_name, data.split, data.text_key, data.heldout, files]


def _tfds_documents(builder: tfds.core.DatasetBuilder, data) -> Iterator[tuple[bytes, bool]]:
    """The documents of a split; held out by the hash of the text, so that copies of a document stay on one side."""
    features = list(builder.info.features)
    if data.text_key not in features:
        raise unknown("data.text_key", data.text_key, features)
    source = prepared.examples(builder, data.split, name=("data.name", data.name), split_field="data.split")
    for document in source:
        text = document[data.text_key]
        if not isinstance(text, bytes):
            raise UsageError("data.text_key", data.text_key, f"holds {type(text).__name__}, not text")
        for piece in _pieces(text) if len(source) < _FEW_DOCUMENTS else [text]:
            yield piece, text_files.is_heldout(piece, data.heldout)


def _pieces(text: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + _PIECE_BYTES - 1) + 1 or len(text)
        yield text[start:end]
        start = end
