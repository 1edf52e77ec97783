"""A TFDS dataset over text files that are already on this machine, one document a file.

It serves two corpora: the Python standard library, which every Python has (`stdlib`), and any folder (`folder`). A file
is held out by a hash of its path, so that adding or changing a file never moves another from one split to the other.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import tensorflow_datasets as tfds
from absl import logging as absl_logging

from grlab.errors import UsageError

# Folders of the standard library that are left out; about 10 of its 31 MB stay. `test` alone is 17 MB, much of it
# tables of expected values, and slim installations do without it and the other test folders. `encodings` and
# `pydoc_data` are generated: a hundred near copies of one table of characters, on both sides of any split, and one file
# of documentation that would be most of the held-out text. `config-*` and `_sysconfigdata*` are written by the build
# and hold its paths.
_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),
}
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")

_log = logging.getLogger(__name__)


def is_heldout(key: bytes, fraction: float) -> bool:
    """Whether the document that `key` names is held out: true of `fraction` of all keys, and for ever the same."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") < fraction * 2**64


def check_split(train: int, heldout: int, fraction: float) -> None:
    """Raises unless both splits have documents."""
    if not heldout:
        raise UsageError("data.heldout", fraction, f"none of {train} documents is held out: raise it, or add documents")
    if not train:
        raise UsageError("data.heldout", fraction, f"all {heldout} documents are held out: lower it, or add documents")


@dataclasses.dataclass(frozen=True, eq=False)
class FileList:
    """The files of a corpus and what they held when they were listed."""

    root: Path
    digests: dict[str, bytes]  # relative path -> sha256 of the content, in sorted order
    heldout: float

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex sha256 over the sorted paths, their contents and what decides the split."""
        sha = hashlib.sha256(f"{TextFiles.name} {TextFiles.VERSION} heldout={self.heldout!r}".encode())
        for path, digest in self.digests.items():
            # A NUL cannot be part of a path, and a digest has a fixed length: no two lists give the same bytes.
            sha.update(os.fsencode(path) + b"\0" + digest)
        return sha.hexdigest()

    def split(self, heldout: bool) -> list[str]:
        """The relative paths of one of the two splits."""
        return [path for path in self.digests if is_heldout(os.fsencode(path), self.heldout) == heldout]


def stdlib(heldout: float) -> FileList:
    """The .py files of the running Python's standard library; those that are not UTF-8 or hold a NUL are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    return _listed(root, _stdlib_files(root), heldout, on_bad=lambda path: None, nothing=("data.name", "stdlib"))


def folder(path: str | None, glob: str, heldout: float) -> FileList:
    """The files under `path` that match `glob` (`**/*.txt` for subfolders too); empty ones are left out.

    Raises UsageError for a missing folder, a glob that matches no text, and a file that is not UTF-8 or holds a NUL.
    """
    if not path:
        raise UsageError("data.path", path, "data.name=folder needs the folder of text files")
    root = Path(path).expanduser()
    if not root.is_dir():
        raise UsageError("data.path", path, "no such folder")
    try:
        matches = [match for match in root.glob(glob) if match.is_file()]
    except (ValueError, NotImplementedError) as e:
        raise UsageError("data.glob", glob, f"not a pattern relative to data.path: {e}") from None

    def refuse(bad: Path) -> None:
        raise UsageError("data.glob", glob, f"{bad} is not UTF-8 or holds a NUL: narrow the pattern, or mend it")

    return _listed(root, matches, heldout, on_bad=refuse, nothing=("data.glob", glob))


def _stdlib_files(root: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(_SKIPPED_PREFIXES)]
        yield from (
            Path(parent, name) for name in names if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES)
        )


def _listed(root: Path, paths: Iterable[Path], heldout: float, on_bad, nothing: tuple[str, str]) -> FileList:
    digests = {}
    for path in sorted(paths):
        try:
            text = path.read_bytes()
        except OSError as e:
            raise UsageError("data.path", str(root), f"cannot read {path}: {e.strerror}") from e
        if not _is_text(text):
            on_bad(path)
        elif text:
            digests[path.relative_to(root).as_posix()] = hashlib.sha256(text).digest()
    if not digests:
        raise UsageError(*nothing, f"no text in {root}")
    files = FileList(root, digests, heldout)
    check_split(len(files.split(heldout=False)), len(files.split(heldout=True)), heldout)
    return files


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


@dataclasses.dataclass(eq=False, kw_only=True)
class _FilesConfig(tfds.core.BuilderConfig):
    files: FileList


# Not registered with TFDS: without a list of files it is no dataset.
class TextFiles(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Splits `train` and `heldout` of documents {text, path}, in TFDS's own shuffled order, which is deterministic."""

    VERSION = tfds.core.Version("1.0.0")
    url_infos = {}  # nothing is downloaded: spares TFDS the search for checksums beside this file

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Text files, one document a file.",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text(), "path": tfds.features.Text()}),
        )

    def _split_generators(self, dl_manager):
        files = self.builder_config.files
        return {
            "train": self._generate_examples(files.split(heldout=False)),
            "heldout": self._generate_examples(files.split(heldout=True)),
        }

    def _generate_examples(self, paths: list[str]):
        files = self.builder_config.files
        for path in paths:
            text = (files.root / path).read_bytes()
            if hashlib.sha256(text).digest() != files.digests[path]:
                raise UsageError("data.path", str(files.root), f"{path} changed while it was read: start again")
            yield os.fsencode(path), {"text": text, "path": os.fsencode(path)}


def prepare(name: str, files: FileList, data_dir: Path) -> TextFiles:
    """The prepared dataset, under `data_dir` in a folder named after `files.fingerprint`; written if it is not there.

    TFDS writes to a folder of its own and renames it at the end, so that a killed process leaves nothing that could be
    taken for the dataset. Of two processes that prepare it at once the later rename fails, and finds the first's work.
    """

    def open_builder() -> TextFiles:
        config = _FilesConfig(name=f"{name}-{files.fingerprint[:16]}", files=files)
        return TextFiles(data_dir=data_dir, config=config, file_format="array_record")

    with quiet():
        builder = open_builder()
        if not builder.is_prepared():
            _log.info("preparing %d files of %s in %s (once)", len(files.digests), files.root, data_dir)
            try:
                builder.download_and_prepare()
            except OSError as e:
                builder = open_builder()
                if not builder.is_prepared():
                    raise UsageError("data.dir", str(data_dir), f"the dataset cannot be written there: {e}") from e
    return builder


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Runs TFDS without its progress bars, its notices on stdout and absl's warnings; errors pass."""
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()
        absl_logging.set_verbosity(verbosity)
