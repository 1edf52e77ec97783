import hashlib
import subprocess
import sys
from pathlib import Path

import ml_collections
import numpy as np
import pytest
import tensorflow_datasets as tfds

from configs.base import get_config
from grlab.data import corpus, text_files
from grlab.data import tokenizer as tokenizers
from grlab.data.batches import heldout_bytes
from grlab.errors import UsageError
from tests import small_tokenizers

REPO = Path(__file__).parents[2]
TEXTS = [f"document {i}\n{'é' * i}".encode() for i in range(60)]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{i}.txt").write_bytes(text)
    return tmp_path


def fields(root, **changes) -> ml_collections.ConfigDict:
    data = get_config().data
    data.update(dict(name="folder", path=str(root / "texts"), dir=str(root / "data"), heldout=0.25) | changes)
    return data


def documents(loaded: corpus.Corpus) -> tuple[list[bytes], list[bytes]]:
    assert loaded.train[-1] == loaded.separator == 0
    return bytes(loaded.train).split(b"\0")[:-1], [bytes(text) for text in loaded.heldout]


def test_every_document_is_trained_on_or_held_out(root):
    loaded = corpus.load(fields(root))
    train, heldout = documents(loaded)
    assert sorted(train + heldout) == sorted(TEXTS)
    assert {f"{TEXTS.index(text)}.txt" for text in heldout} == {
        f"{i}.txt" for i in range(60) if text_files.is_heldout(f"{i}.txt".encode(), 0.25)
    }
    # The order of the held-out documents says nothing of them, so that a prefix is a fair sample.
    assert heldout == sorted(heldout, key=lambda text: hashlib.sha256(text).digest())
    assert loaded.train.dtype == loaded.heldout[0].dtype == np.uint8
    assert (loaded.name, loaded.vocab_size) == ("folder", 256)


def test_the_second_load_is_the_first(root, monkeypatch):
    first = corpus.load(fields(root))
    monkeypatch.setattr(text_files, "prepare", None)  # the tokens on disk are enough
    second = corpus.load(fields(root))
    assert documents(first) == documents(second) and first.fingerprint == second.fingerprint


def test_a_changed_file_changes_the_corpus_and_its_fingerprint(root):
    fingerprints = {corpus.load(fields(root)).fingerprint}
    for split in (0, 1):
        text = max(documents(corpus.load(fields(root)))[split])
        changed = text.replace(b"document", b"cocument")  # as long as before
        (root / "texts" / f"{TEXTS.index(text)}.txt").write_bytes(changed)
        loaded = corpus.load(fields(root))
        assert changed in documents(loaded)[split]
        fingerprints.add(loaded.fingerprint)
    assert len(fingerprints) == 3


def test_one_content_has_one_fingerprint_wherever_it_is(root, tmp_path):
    first = corpus.load(fields(root))
    (root / "texts").rename(root / "moved")
    second = corpus.load(fields(root, path=str(root / "moved"), dir=str(root / "other")))
    assert first.fingerprint == second.fingerprint


def test_bytes_are_the_corpus_that_they_always_were(root):
    """Older runs name this fingerprint, and tokens that are on disk already are found."""
    loaded = corpus.load(fields(root))
    assert loaded.fingerprint == "5ac17dea10fa898674d9ba61be121f4e37c4200c1de419c72554244f1faba95c"
    (folder,) = (root / "data" / "tokens").iterdir()
    assert folder.name == "folder-cae6739712bc627b"
    assert sorted(path.name for path in folder.iterdir()) == ["fingerprint", "heldout.npy", "train.npy"]
    assert [list(counts) for counts in loaded.heldout_bytes] == [[1] * len(text) for text in loaded.heldout]


@pytest.fixture
def files(root):
    return {
        "bpe": str(small_tokenizers.bpe(root / "bpe.json")),
        "sentencepiece": str(small_tokenizers.sentencepieces(root / "sp.model")),
    }


@pytest.mark.parametrize("name", ["bpe", "sentencepiece"])
def test_a_corpus_of_another_tokenizer_is_the_same_documents(name, root, files):
    train, heldout = documents(corpus.load(fields(root, max_bytes=1000)))
    loaded = corpus.load(fields(root, max_bytes=1000, tokenizer=files[name]))
    tokenizer = tokenizers.load(files[name])
    assert (loaded.vocab_size, loaded.separator) == (tokenizer.vocab_size, tokenizer.separator)
    assert loaded.train.dtype == loaded.heldout[0].dtype == np.uint16
    assert list(loaded.train) == [i for text in train for i in (*tokenizer.encode(text), tokenizer.separator)]
    for text, tokens, counts in zip(heldout, loaded.heldout, loaded.heldout_bytes, strict=True):
        assert [list(tokens), list(counts)] == [list(part) for part in tokenizer.encode_counted(text)]
    # Up to the middle of a document, and to the end of all: the bytes that a reader of the text would count.
    first, scored = len(loaded.heldout[0]), len(loaded.heldout[0]) + 3
    middle = len(heldout[0]) + tokenizer.encode_counted(heldout[1])[1][:2].sum()
    assert heldout_bytes(loaded.heldout_bytes, max_tokens=first + 1) == len(heldout[0])
    assert heldout_bytes(loaded.heldout_bytes, max_tokens=scored) == middle
    assert heldout_bytes(loaded.heldout_bytes, max_tokens=10**9) == sum(map(len, heldout))


def test_each_tokenizer_has_tokens_and_a_fingerprint_of_its_own(root, files, monkeypatch):
    (root / "spaced.json").write_bytes((root / "bpe.json").read_bytes() + b"\n")  # another file of the same tokens
    choices = [None, *files.values(), str(root / "spaced.json")]
    prints = [corpus.load(fields(root, tokenizer=path)).fingerprint for path in choices]
    assert len(set(prints)) == 4
    (root / "moved.json").write_bytes((root / "bpe.json").read_bytes())
    monkeypatch.setattr(text_files, "prepare", None)  # the tokens on disk are enough
    again = [corpus.load(fields(root, tokenizer=path)).fingerprint for path in (*choices, str(root / "moved.json"))]
    assert again == [*prints, prints[1]]


def test_documents_that_hold_the_separator_or_are_no_text_are_left_out(root, caplog):
    loose = small_tokenizers.bpe(root / "loose.json", special=False)  # its separator is found in documents
    whole = small_tokenizers.bpe(root / "whole.json")
    (root / "texts" / "0.txt").write_bytes(b"a <|endoftext|> b")
    for file, left_out in ((loose, True), (whole, False)):
        loaded = corpus.load(fields(root, tokenizer=str(file)))
        count = np.count_nonzero(loaded.train == loaded.separator) + len(loaded.heldout)
        assert count == len(TEXTS) - left_out
        assert ("1 documents are not UTF-8 or hold the separator and were left out" in caplog.text) == left_out
        caplog.clear()


def test_reading_stops_at_max_bytes(root):
    loaded = [corpus.load(fields(root, max_bytes=n)) for n in (10**9, 1000)]
    assert loaded[0].fingerprint != loaded[1].fingerprint
    whole, part = map(documents, loaded)
    assert part[0] == whole[0][: len(part[0])] and part[1] == whole[1]
    assert 1000 <= sum(len(text) + 1 for text in part[0]) < 1000 + max(map(len, TEXTS)) + 1


def test_tokens_written_twice_at_once_stay_whole(root, monkeypatch):
    first = corpus.load(fields(root))
    (folder,) = (root / "data" / "tokens").iterdir()
    other = corpus._Heldout(b"", np.frombuffer(b"other", np.uint8), np.ones(5, np.uint8))
    corpus._save(folder, bytearray(b"other\0"), [other], first.tokenizer)  # the later of two: the folder is there
    assert documents(corpus.load(fields(root))) == documents(first)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


class Toy(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A dataset that TFDS does not know in code, as one prepared elsewhere."""

    VERSION = tfds.core.Version("1.2.3")
    url_infos = {}
    texts = TEXTS + TEXTS[:10] + [b"", b"nul\0"] + [f"more {i}".encode() for i in range(40)]

    def _info(self):
        features = {"body": tfds.features.Text(), "label": tfds.features.Scalar(np.int64)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(self.texts), "test": self._generate_examples([b"a"])}

    def _generate_examples(self, texts):
        yield from ((i, {"body": text, "label": i}) for i, text in enumerate(texts))


class ToyBook(Toy, skip_registration=True):
    texts = [b"".join(b"line %d of the only book\n" % i for i in range(10_000))]


class ToyRefused(Toy):
    """Known to TFDS, and not to be had."""

    def _split_generators(self, dl_manager):
        raise ImportError("needs a package that is not here\nand a second line")


def prepared(root, cls=Toy, file_format="array_record") -> ml_collections.ConfigDict:
    with text_files.quiet():
        cls(data_dir=root / "data", file_format=file_format).download_and_prepare()
    return fields(root, name=cls.name, text_key="body")


def test_a_dataset_on_disk_that_tfds_knows_only_by_name(root, caplog):
    data = prepared(root)
    loaded = corpus.load(data)
    train, heldout = documents(loaded)
    assert sorted(train + heldout) == sorted(text for text in Toy.texts if text and b"\0" not in text)
    assert "1 documents hold a NUL" in caplog.text
    assert heldout and all(text_files.is_heldout(text, 0.25) for text in heldout)
    assert not any(text_files.is_heldout(text, 0.25) for text in train)
    with pytest.raises(UsageError, match="^data.heldout=0.25: none of 1 documents is held out"):
        corpus.load(fields(root, name="toy", text_key="body", split="test"))
    data.split = "train[:50%]"
    assert corpus.load(data).fingerprint != loaded.fingerprint


def test_a_long_document_alone_is_cut_at_line_ends(root):
    train, heldout = documents(corpus.load(prepared(root, ToyBook)))
    pieces = train + heldout
    assert len(heldout) >= 5
    assert sum(map(len, pieces)) == len(ToyBook.texts[0])
    assert all(piece in ToyBook.texts[0] and piece.endswith(b"book\n") for piece in pieces)
    assert sorted(map(len, pieces))[1] >= 4096 and max(map(len, pieces)) < 4200


def test_each_wrong_dataset_is_one_line(root):
    data = prepared(root)
    toy = dict(name="toy", text_key="body")
    for change, line in [
        (dict(name="tiny_shakespear"), "data.name='tiny_shakespear': did you mean 'tiny_shakespeare'\\? known: std"),
        (dict(name="stdlb"), "data.name='stdlb': did you mean 'stdlib'\\?"),
        (dict(name="qzxv"), "data.name='qzxv': known: stdlib"),
        (dict(name="lm1b/nonsuch"), "data.name='lm1b/nonsuch': TFDS cannot open it \\("),
        (dict(name="toy_refused"), "data.name='toy_refused': TFDS cannot prepare it here \\(ImportError: needs a pack"),
        (toy | dict(text_key="bdy"), "data.text_key='bdy': did you mean 'body'"),
        (toy | dict(text_key="label"), "data.text_key='label': holds int, not text"),
        (toy | dict(split="tran"), "data.split='tran': did you mean 'train'"),
        (dict(heldout=0.0), "data.heldout=0.0: a fraction"),
        (dict(max_bytes=0), "data.max_bytes=0: must be above 0"),
    ]:
        with pytest.raises(UsageError, match="^" + line) as e:
            corpus.load(fields(root, **{"name": data.name} | change))
        assert "\n" not in str(e.value)


def test_a_dataset_in_a_format_without_random_access_is_one_line(root):
    data = prepared(root)
    (info,) = (root / "data").rglob("dataset_info.json")
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(UsageError, match="^data.name='toy': prepare it with file_format=array_record"):
        corpus.load(data)


def test_the_text_datasets_of_tfds_are_known_without_tensorflow(root):
    with pytest.raises(UsageError, match="did you mean 'wiki40b'"):
        corpus.load(fields(root, name="wiki40bb/en"))


def test_the_standard_library_loads_quietly_without_tensorflow(tmp_path):
    program = (
        "import sys, time; from configs.base import get_config; from grlab.data import batches, corpus\n"
        "data = get_config().data; corpus.load(data); start = time.time(); loaded = corpus.load(data)\n"
        "assert 'tensorflow' not in sys.modules\n"
        "print(time.time() - start, len(loaded.train), sum(map(len, loaded.heldout)))\n"
    )
    env = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "", "HOME": str(tmp_path / "untouched")}
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, cwd=REPO, env=env, capture_output=True, text=True, check=True)
    seconds, train, heldout = map(float, done.stdout.split())
    assert done.stderr == ""
    assert seconds < 2 and train > 7e6 and heldout > 1e5
    assert (tmp_path / "grlab" / "text_files").is_dir() and not (tmp_path / "untouched").exists()
