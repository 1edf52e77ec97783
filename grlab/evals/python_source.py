"""Documents that are Python, as the tokens of their code and the bytes where each stands."""

import ast
import io
import itertools
import random
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

READ_LIMIT = 4_000_000  # bytes of documents to parse, which takes seconds


class Token(NamedTuple):
    kind: int
    text: str
    start: int  # bytes from the start of the document
    end: int


class Source(NamedTuple):
    """A document and the tokens of its code: no comments, no blank lines, of an f-string only where it starts."""

    data: bytes
    tokens: list[Token]

    def statements(self) -> Iterator[list[Token]]:
        """The logical lines; the last token of each is its NEWLINE."""
        line = []
        for token in self.tokens:
            line.append(token)
            if token.kind == tokenize.NEWLINE:
                yield line
                line = []


def sources(documents: Sequence[bytes | np.ndarray], rng: random.Random) -> Iterator[tuple[int, Source]]:
    """(index, source) of the documents that are Python in UTF-8, in random order, until READ_LIMIT bytes are read."""
    order = list(range(len(documents)))
    rng.shuffle(order)
    read = 0
    for index in order:
        if read >= READ_LIMIT:
            return
        data = _bytes(documents[index])
        read += len(data)
        if (source := parse(data)) is not None:
            yield index, source


def _bytes(document: bytes | np.ndarray) -> bytes:
    if isinstance(document, np.ndarray) and document.dtype != np.uint8:
        raise TypeError(f"a document of {document.dtype}: the benchmarks are made from bytes (uint8)")
    return bytes(document)


def parse(data: bytes) -> Source | None:
    """The tokens of a document's code; None if it is not Python in UTF-8."""
    try:
        text = data.decode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the corpus's own code, such as invalid escapes
            ast.parse(text)
        lines = io.StringIO(text, newline="\n").readlines()
        raw = list(tokenize.generate_tokens(iter(lines + [""]).__next__))
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError, MemoryError):
        return None

    starts = list(itertools.accumulate((len(line.encode()) for line in lines), initial=0))

    def offset(row: int, column: int) -> int:
        return starts[row - 1] + (column if lines[row - 1].isascii() else len(lines[row - 1][:column].encode()))

    kept = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING, tokenize.NEWLINE}
    tokens, f_strings = [], 0
    for kind, string, start, end, _ in raw:
        # f-strings are one STRING up to Python 3.11, and tokens of their own after: of those the first is kept.
        name = tokenize.tok_name[kind]
        starts_f_string = name.endswith("STRING_START")
        if (starts_f_string or kind in kept) and not f_strings and string:  # an empty NEWLINE is one that is missing
            tokens.append(Token(kind, string, offset(*start), offset(*end)))
        f_strings += starts_f_string - name.endswith("STRING_END")
    if any(data[token.start : token.end] != token.text.encode() for token in tokens):
        return None  # line ends that the tokenizer rewrote: its places are not ours
    return Source(data, tokens)
