"""Tokenizers: what a text becomes, how many bytes each token stands for, and files that are none.

Seen to fail: special tokens that are looked for in documents break `test_what_spells_the_separator_...`; a file's
truncation breaks `test_what_a_file_asks_for_...`; bytes counted to the token's own end break
`test_a_character_counts_with_the_last_of_its_tokens` and `test_the_bytes_of_tokens_...`.
"""

import sys

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, processors

from grlab.data import tokenizer as tokenizers
from grlab.errors import UsageError
from tests import small_tokenizers

TEXTS = [
    b"the quick brown fox",
    b"  two spaces, a tab\tand a line\n\n    indented   \n",
    "naïve café 100 € 語 🙂🙂 end".encode(),
    "🙂".encode(),
    b"<|endoftext|> </s> <s> [CLS]",
    b"a",
    b" ",
    b"",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")

    def trim(tokenizer):  # GPT-2's files do, and then no token covers the spaces
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)

    return {
        "bytes": None,
        "bpe": str(small_tokenizers.bpe(root / "bpe.json")),
        "trimmed": str(small_tokenizers.bpe(root / "trimmed.json", change=trim)),
        "words": str(small_tokenizers.words(root / "words.json", {"?": 0, "the": 1, "fox": 2, "</s>": 9})),
        "sentencepiece": str(small_tokenizers.sentencepieces(root / "sp.model")),
    }


@pytest.fixture(params=["bytes", "bpe", "trimmed", "words", "sentencepiece"])
def tokenizer(request, files):
    return tokenizers.load(files[request.param])


def test_the_bytes_of_tokens_sum_to_those_of_the_text(tokenizer):
    for text in TEXTS:
        ids, counts = tokenizer.encode_counted(text)
        assert list(ids) == list(tokenizer.encode(text))
        assert len(ids) == len(counts) and counts.sum() == (len(text) if len(ids) else 0)
        assert ids.dtype == tokenizer.encode(text).dtype == np.min_scalar_type(tokenizer.vocab_size - 1)
        assert not len(ids) or ids.max() < tokenizer.vocab_size


def test_a_prefix_of_the_tokens_stands_for_the_bytes_that_it_spells(files):
    text = b"the quick  brown fox\tjumps over\n  the lazy dog"
    for name in ("bpe", "trimmed"):
        ids, counts = tokenizers.load(files[name]).encode_counted(text)
        spells = Tokenizer.from_file(files[name]).decode
        raw = [spells([i]).replace("Ġ", " ").replace("Ċ", "\n").replace("ĉ", "\t") for i in ids]
        assert len(raw) > 10 and "".join(raw).encode() == text
        assert list(counts) == list(map(len, raw))
    text = b"the quick brown fox number 7 jumps"  # SentencePiece makes one space of many, and puts one before all
    ids, counts = tokenizers.load(files["sentencepiece"]).encode_counted(text)
    pieces = SentencePieceProcessor(model_file=files["sentencepiece"]).id_to_piece(list(map(int, ids)))
    raw = [piece.replace("▁", " ") for piece in pieces]
    assert len(raw) > 5 and "".join(raw).encode() == b" " + text
    assert list(counts) == [len(raw[0]) - 1, *map(len, raw[1:])]


def test_a_character_counts_with_the_last_of_its_tokens(files):
    text = "a€a".encode()
    assert list(tokenizers.load(files["bpe"]).encode_counted(text)[1]) == [1, 0, 0, 3, 1]
    assert list(tokenizers.load(files["trimmed"]).encode_counted(text)[1]) == [1, 0, 0, 3, 1]
    assert list(tokenizers.load(files["sentencepiece"]).encode_counted(text)[1]) == [1, 0, 0, 3, 1]


def test_what_spells_the_separator_in_a_document_is_ordinary_text(tokenizer):
    for text in TEXTS[1:5]:
        ids = tokenizer.encode(text)
        assert len(ids) and tokenizer.separator not in ids


def test_the_separator_is_the_end_of_a_text(files, tmp_path):
    assert tokenizers.load(None).separator == 0
    assert tokenizers.load(files["words"]).separator == 9
    assert tokenizers.load(files["bpe"]).separator == Tokenizer.from_file(files["bpe"]).token_to_id("<|endoftext|>")
    vocab = {"?": 0, "</s>": 1, "<|endoftext|>": 2, "<eos>": 3}
    assert tokenizers.load(str(small_tokenizers.words(tmp_path / "three.json", vocab))).separator == 2
    moved = small_tokenizers.sentencepieces(tmp_path / "moved.model", bos_id=2, eos_id=3, pad_id=1)
    assert [tokenizers.load(str(file)).separator for file in (files["sentencepiece"], moved)] == [2, 3]


def test_ids_may_have_gaps_and_need_any_width(files, tmp_path):
    sizes = [tokenizers.load(files[name]).vocab_size for name in ("words", "bpe", "sentencepiece")]
    assert sizes == [10, 301, 340]
    for largest, dtype in ((255, np.uint8), (256, np.uint16), (65_535, np.uint16), (65_536, np.uint32)):
        file = small_tokenizers.words(tmp_path / f"{largest}.json", {"?": 0, "</s>": 1, "fox": largest})
        ids = tokenizers.load(str(file)).encode(b"fox")
        assert (list(ids), ids.dtype) == ([largest], dtype)


def test_what_a_file_asks_for_beside_the_tokens_is_left_out(files, tmp_path):
    def ask(tokenizer):
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=50)
        end = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{end[0]} $A {end[0]}", special_tokens=[end])

    asking = tokenizers.load(str(small_tokenizers.bpe(tmp_path / "asking.json", change=ask)))
    for text in TEXTS:
        assert list(asking.encode(text)) == list(tokenizers.load(files["bpe"]).encode(text))


def test_the_fingerprint_is_of_the_content(files, tmp_path):
    copy = tmp_path / "copy.json"
    copy.write_bytes(open(files["bpe"], "rb").read())
    prints = [tokenizers.load(path).fingerprint for path in (*files.values(), str(copy))]
    assert prints[1] == prints[-1] and len(set(prints)) == len(files)


def test_text_that_is_not_utf8_is_refused(files):
    for name in ("bpe", "sentencepiece"):
        with pytest.raises(UnicodeDecodeError):
            tokenizers.load(files[name]).encode(b"caf\xe9")


def test_each_wrong_file_is_one_line(files, tmp_path):
    (tmp_path / "junk.json").write_text('{"model": 3}')
    (tmp_path / "latin.json").write_bytes(b"\xe9")
    (tmp_path / "junk.model").write_text("junk")
    (tmp_path / "folder.json").mkdir()
    for name in ("empty.json", "empty.model"):
        (tmp_path / name).touch()
    small_tokenizers.bpe(tmp_path / "endless.json", end=None)
    small_tokenizers.sentencepieces(tmp_path / "endless.model", eos_id=-1)
    for name, line in [
        ("nosuch.json", "cannot be read: No such file"),
        ("folder.json", "cannot be read: Is a directory"),
        ("bpe.txt", r"must be \*.json \(of the package tokenizers\) or \*.model"),
        ("empty.json", "is empty$"),
        ("empty.model", "is empty$"),
        ("junk.json", r"the package tokenizers cannot read it \("),
        ("latin.json", r"the package tokenizers cannot read it \(UnicodeDecodeError"),
        ("junk.model", r"the package sentencepiece cannot read it \("),
        ("endless.json", r"has none of <\|endoftext\|> .* </s> <eos>: add the token that ends a document"),
        ("endless.model", r"has no end of sentence \(eos_id is -1\)"),
    ]:
        with pytest.raises(UsageError, match=f"^data.tokenizer='{tmp_path}/{name}': {line}") as e:
            tokenizers.load(str(tmp_path / name))
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("name, package", [("bpe", "tokenizers"), ("sentencepiece", "sentencepiece")])
def test_a_missing_package_is_named_with_the_way_to_it(name, package, files, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"needs the package {package}: pip install {package}$"):
        tokenizers.load(files[name])
    assert tokenizers.load(None).vocab_size == 256
