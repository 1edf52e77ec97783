"""Folders of safetensors files, as Hugging Face checkpoints are, and which tensor in them is which parameter.

Each tensor of a checkpoint is cut into views that have the shapes of parts of our parameters: importing copies the
views, exporting fills them, so that a correspondence is written down once for both directions.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save_file

from grlab.errors import UsageError, first_line

INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # what a parameter may be stored in: of anything else, the scales are elsewhere
WHOLE = ("I64", "I32")
Where = tuple[str | int, ...]  # the path of a parameter in a module's state


class TensorFolder:
    """The checkpoint in a folder. Opening it reads the headers of its files: names, shapes, and no tensor."""

    def __init__(self, folder: str | Path):
        """Raises UsageError where there is no such checkpoint."""
        self.path = Path(folder)
        if not self.path.is_dir():
            remedy = "give a local folder with config.json and *.safetensors (download it first)"
            raise UsageError("--hf", str(folder), remedy)
        self.config = self._json("config.json")
        if not isinstance(self.config, dict):
            raise UsageError("--hf", str(folder), "config.json is not a JSON object")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._file_of: dict[str, Path] = {}
        self._opened: tuple[Path, safetensors.safe_open] | None = None
        for file in self._files():
            with self._open(file) as tensors:
                for name in tensors.keys():
                    tensor = tensors.get_slice(name)
                    self.shapes[name] = tuple(tensor.get_shape())
                    self.dtypes[name] = tensor.get_dtype()
                    self._file_of[name] = file

    def read(self, name: str) -> np.ndarray:
        """The tensor in the dtype it is stored in."""
        self.refuse_dtypes([name], (*FLOATS, *WHOLE))
        file = self._file_of[name]
        if self._opened is None or self._opened[0] != file:  # one at a time
            self._opened = (file, self._open(file))
        return self._opened[1].get_tensor(name)

    def refuse_dtypes(self, names: Iterable[str], known: tuple[str, ...]) -> None:
        """Raises one UsageError that lists the tensors of another dtype than `known`."""
        if other := [f"{name} is {self.dtypes[name]}" for name in names if self.dtypes[name] not in known]:
            remedy = f"{_few(other)}: a dtype that is not read, convert the checkpoint to BF16 or F32"
            raise UsageError("--hf", str(self.path), remedy)

    def _files(self) -> list[Path]:
        if (self.path / INDEX).exists():
            index = self._json(INDEX)
            names = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
                raise UsageError("--hf", str(self.path), f"{INDEX} has no weight_map from tensors to files")
            files = sorted({self.path / name for name in names.values()})
            if absent := [str(file.relative_to(self.path)) for file in files if not file.is_file()]:
                raise UsageError("--hf", str(self.path), f"{_few(absent)} of {INDEX} is not there: download it")
        else:
            files = sorted(self.path.glob("*.safetensors"))
        if not files:
            only = " but *.bin: convert it to safetensors" if any(self.path.glob("*.bin")) else ""
            raise UsageError("--hf", str(self.path), f"has no *.safetensors file{only}")
        return files

    def _open(self, file: Path):
        try:
            return safetensors.safe_open(file, framework="numpy")
        except (OSError, safetensors.SafetensorError) as e:
            raise UsageError("--hf", str(self.path), f"{file.name} cannot be read ({first_line(e)})") from e

    def _json(self, name: str):
        try:
            return json.loads((self.path / name).read_text())
        except OSError:
            raise UsageError("--hf", str(self.path), f"is no checkpoint: there is no {name}") from None
        except ValueError as e:
            raise UsageError("--hf", str(self.path), f"{name} is not JSON ({first_line(e)})") from None


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, and the parts of our parameters that it consists of.

    `views` cuts an array of `shape` into views of the shapes of `parts`, whose index may have whole numbers.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Where, tuple[int | slice, ...]], ...]
    views: Callable[[np.ndarray], list[np.ndarray]]


class Parameters:
    """The parameters of a checkpoint: each assembled from its tensors when it is asked for, and no more of it."""

    def __init__(self, folder: TensorFolder, tensors: list[Tensor]):
        self._folder = folder
        self._sources: dict[Where, list[tuple[tuple, Tensor, int]]] = {}
        for tensor in tensors:
            for number, (path, index) in enumerate(tensor.parts):
                self._sources.setdefault(path, []).append((index, tensor, number))

    def part(self, path: Where, shape: tuple[int, ...], wanted: Sequence[slice]) -> np.ndarray:
        """The part `wanted` of the parameter at `path`, float32."""
        wanted = tuple(slice(*s.indices(size)) for s, size in zip(wanted, shape, strict=True))
        out = np.empty([s.stop - s.start for s in wanted], np.float32)
        for index, tensor, number in self._sources[path]:
            box = [slice(i, i + 1) if isinstance(i, int) else i for i in index]
            box += [slice(None)] * (len(shape) - len(box))
            box = [slice(*s.indices(size)) for s, size in zip(box, shape, strict=True)]
            both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, wanted, strict=True)]
            if all(s.start < s.stop for s in both):
                view = tensor.views(self._folder.read(tensor.name))[number]
                view = view.reshape([s.stop - s.start for s in box])
                inside = [slice(s.start - b.start, s.stop - b.start) for s, b in zip(both, box, strict=True)]
                into = [slice(s.start - w.start, s.stop - w.start) for s, w in zip(both, wanted, strict=True)]
                out[tuple(into)] = view[tuple(inside)]
        return out

    def whole(self, path: Where, shape: tuple[int, ...]) -> np.ndarray:
        return self.part(path, shape, (slice(None),) * len(shape))


def check(folder: TensorFolder, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
    """Raises one UsageError that lists the expected tensors that are missing or mis-shaped, and those not expected,
    or the expected ones of a dtype that is not read.

    A tensor whose name begins with one of `ignored` may be there.
    """
    ignored = tuple(ignored)
    folder.refuse_dtypes([name for name in expected if name in folder.shapes], FLOATS)
    missing = [name for name in expected if name not in folder.shapes]
    unknown = [name for name in folder.shapes if name not in expected and not name.startswith(ignored)]
    shapes = ((name, folder.shapes[name], shape) for name, shape in expected.items() if name in folder.shapes)
    wrong = [f"{name} {list(there)} instead of {list(shape)}" for name, there, shape in shapes if there != shape]
    found = [("missing", missing), ("unknown", unknown), ("mis-shaped", wrong)]
    if any(names for _, names in found):
        parts = [f"{len(names)} {what}: {_few(names)}" for what, names in found if names]
        raise UsageError("--hf", str(folder.path), "tensors do not fit its config.json; " + "; ".join(parts))


def _few(names: list[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def write(
    folder: str | Path, config: dict, tensors: Iterator[tuple[str, np.ndarray]], file_bytes: int = 5_000_000_000
) -> None:
    """Writes a checkpoint: files of about `file_bytes` at most, their index, and config.json.

    `tensors` is read as it comes: no more than one file's tensors are in memory. Raises UsageError for a folder that
    holds something.
    """
    path = Path(folder)
    if path.exists() and any(path.iterdir()):
        raise UsageError("folder", str(folder), "is not empty: give a new one")
    path.mkdir(parents=True, exist_ok=True)
    files: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    total = 0

    def flush():
        save_file(pending, path / _numbered(len(files)), metadata={"format": "pt"})
        files.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > file_bytes:
            flush()
        pending[name] = np.ascontiguousarray(tensor)
        total += tensor.nbytes
    flush()
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    for i, name in enumerate(names):  # how many there are is known only now
        (path / _numbered(i)).rename(path / name)
    weight_map = {tensor: name for name, members in zip(names, files, strict=True) for tensor in members}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / INDEX).write_text(json.dumps(index, indent=1))
    (path / "config.json").write_text(json.dumps(config, indent=1))


def _numbered(i: int) -> str:
    return f"incomplete-{i + 1:05}.safetensors"
