import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grlab.data import text_files
from grlab.errors import UsageError

REPO = Path(__file__).parents[2]


@pytest.fixture
def texts():
    return {f"{'ab'[i % 2]}/{i}.txt": f"document {i}\r\nünïcode\t{'x' * i}".encode() for i in range(60)}


@pytest.fixture
def root(tmp_path, texts):
    for path, text in texts.items():
        file = tmp_path / "texts" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)
    (tmp_path / "texts" / "folder.txt").mkdir()
    return tmp_path / "texts"


def listed(root, heldout=0.25):
    return text_files.folder(str(root), "**/*.txt", heldout)


def read(builder):
    splits = {split: builder.as_data_source(split) for split in builder.info.splits}
    return {split: [(d["path"].decode(), d["text"]) for d in source] for split, source in splits.items()}


def test_every_byte_of_every_file_comes_back_in_its_split(root, texts, tmp_path):
    splits = read(text_files.prepare("folder", listed(root), tmp_path / "data"))
    assert dict(splits["train"] + splits["heldout"]) == texts
    assert len(splits["train"]) + len(splits["heldout"]) == len(texts)
    assert [path for path, _ in splits["train"]] != sorted(path for path, _ in splits["train"])  # shuffled


def test_the_split_is_a_hash_of_the_path_alone(root):
    before = set(listed(root).split(heldout=True))
    assert 5 <= len(before) <= 25
    (root / "a" / "new.txt").write_text("new")
    for path in before:
        (root / path).write_text("changed")
    assert set(listed(root).split(heldout=True)) - {"a/new.txt"} == before
    assert before < set(listed(root, heldout=0.5).split(heldout=True))
    # The rule itself, stated apart: changing it moves documents of every corpus that has been trained on.
    first = {p: int(hashlib.sha256(p.encode()).hexdigest()[:16], 16) / 16**16 for p in listed(root).digests}
    assert set(listed(root).split(heldout=True)) == {p for p, x in first.items() if x < 0.25}


def test_neither_the_order_of_listing_nor_the_place_of_the_folder_matters(root, tmp_path, monkeypatch):
    here = listed(root)
    there = Path(shutil.copytree(root, tmp_path / "elsewhere"))
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: reversed(sorted(glob(self, pattern))))
    moved = listed(there)
    assert moved.fingerprint == here.fingerprint
    assert read(text_files.prepare("folder", moved, tmp_path / "1")) == read(
        text_files.prepare("folder", here, tmp_path / "2")
    )


def test_the_fingerprint_tells_contents_paths_and_fractions_apart(root):
    prints = [listed(root).fingerprint, listed(root, heldout=0.26).fingerprint]
    (root / "a" / "0.txt").write_bytes(b"document 1")  # as long as before
    prints.append(listed(root).fingerprint)
    (root / "a" / "0.txt").rename(root / "a" / "00.txt")
    prints.append(listed(root).fingerprint)
    assert len(set(prints)) == 4


def test_a_changed_folder_is_prepared_anew(root, tmp_path):
    old = text_files.prepare("folder", listed(root), tmp_path / "data")
    (root / "a" / "0.txt").write_text("changed")
    new = text_files.prepare("folder", listed(root), tmp_path / "data")
    assert old.data_dir != new.data_dir
    texts = [dict(sum(read(builder).values(), [])) for builder in (old, new)]
    assert texts[0]["a/0.txt"] == b"document 0\r\n\xc3\xbcn\xc3\xafcode\t" and texts[1]["a/0.txt"] == b"changed"


def test_the_loser_of_a_race_takes_the_winners_dataset(root, tmp_path, monkeypatch):
    generate = text_files.TextFiles._generate_examples
    rivals = []

    def overtaken(self, paths):
        if not rivals:
            rivals.append(None)
            rivals[0] = text_files.prepare("folder", listed(root), tmp_path / "data")
        return generate(self, paths)

    monkeypatch.setattr(text_files.TextFiles, "_generate_examples", overtaken)
    loser = text_files.prepare("folder", listed(root), tmp_path / "data")
    assert loser.data_dir == rivals[0].data_dir and read(loser) == read(rivals[0])
    assert not list((tmp_path / "data").rglob("incomplete*"))


def test_a_killed_preparation_leaves_nothing_that_is_taken_for_the_dataset(root, texts, tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from grlab.data import text_files as t\n"
        "g = t.TextFiles._generate_examples\n"
        "def killed(self, paths): yield from g(self, paths[:3]); os.kill(os.getpid(), 9)\n"
        "t.TextFiles._generate_examples = killed\n"
        "t.prepare('folder', t.folder(sys.argv[1], '**/*.txt', 0.25), Path(sys.argv[2]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, root, tmp_path / "data"], cwd=REPO)
    assert done.returncode == -9
    assert list((tmp_path / "data").rglob("incomplete*"))
    splits = read(text_files.prepare("folder", listed(root), tmp_path / "data"))
    assert dict(splits["train"] + splits["heldout"]) == texts


def test_a_file_that_changes_while_it_is_read_is_refused(root, tmp_path):
    files = listed(root)
    (root / "a" / "2.txt").write_text("changed")
    with pytest.raises(UsageError, match="a/2.txt changed while it was read"):
        text_files.prepare("folder", files, tmp_path / "data")
    assert not list((tmp_path / "data").rglob("*.array_record*"))


def test_a_place_that_cannot_be_written_is_named(root, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UsageError, match="^data.dir=.*file.*cannot be written"):
        text_files.prepare("folder", listed(root), tmp_path / "file")


def test_the_standard_library_without_its_tests_tables_and_other_peoples_packages():
    files = text_files.stdlib(0.05)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} < set(files.digests)
    folders = {part for path in files.digests for part in Path(path).parts[:-1]}
    assert not folders & {"site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings"}
    sizes = [os.path.getsize(files.root / path) for path in files.digests]
    assert 7e6 < sum(sizes) < 15e6 and max(sizes) < 0.05 * sum(sizes)
    assert 0.02 < len(files.split(heldout=True)) / len(sizes) < 0.1


def test_stdlib_files_that_are_not_text_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files.sysconfig, "get_path", lambda name: str(tmp_path))
    good = {f"{i}.py": b"pass" for i in range(40)}
    bad = {"latin.py": b"\xe9", "nul.py": b"a\0", "empty.py": b"", "x.txt": b"a", "site-packages/y.py": b"a"}
    for path, text in (good | bad).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(text)
    assert set(text_files.stdlib(0.2).digests) == set(good)


@pytest.mark.parametrize(
    "change, line",
    [
        (dict(path=None), "data.path=None: data.name=folder needs"),
        (dict(path="/no/such"), "data.path='/no/such': no such folder"),
        (dict(glob="*.md"), "data.glob='\\*.md': no text in"),
        (dict(glob="/abs/*.txt"), "data.glob='/abs/.*': not a pattern"),
        (dict(glob="*.bin"), "data.glob='\\*.bin': .*latin.bin is not UTF-8"),
        (dict(glob="*.nul"), "data.glob='\\*.nul': .*x.nul is not UTF-8 or holds a NUL"),
        (dict(heldout=1e-9), "data.heldout=1e-09: none of 60 documents is held out"),
        (dict(heldout=1 - 1e-9), "data.heldout=0.9.*: all 60 documents are held out"),
    ],
)
def test_each_wrong_folder_is_one_line(root, change, line):
    (root / "latin.bin").write_bytes(b"caf\xe9")
    (root / "x.nul").write_bytes(b"a\0b")
    with pytest.raises(UsageError, match="^" + line) as e:
        text_files.folder(**{"path": str(root), "glob": "**/*.txt", "heldout": 0.25} | change)
    assert "\n" not in str(e.value)
