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
Where = tuple[str | int, ...]  # the path of a parameter in a module's state


class TensorFolder:
    """The checkpoint in a folder. Opening it reads the headers of its files: names, shapes, and no tensor."""

    def __init__(self, folder: str | Path):
        """Raises UsageError where there is no such checkpoint."""
        self.path = Path(folder)
        self.config = self._json("config.json")
        if not isinstance(self.config, dict):
            raise UsageError("--hf", str(folder), "config.json is not a JSON object")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        self._opened: tuple[Path, safetensors.safe_open] | None = None
        if (self.path / INDEX).exists():
            files = sorted({self.path / name for name in self._json(INDEX).get("weight_map", {}).values()})
        else:
            files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise UsageError("--hf", str(folder), "has no *.safetensors file")
        for file in files:
            with self._open(file) as tensors:
                for name in tensors.keys():
                    self.shapes[name] = tuple(tensors.get_slice(name).get_shape())
                    self._file_of[name] = file

    def read(self, name: str) -> np.ndarray:
        """The tensor in the dtype it is stored in."""
        file = self._file_of[name]
        if self._opened is None or self._opened[0] != file:  # one at a time
            self._opened = (file, self._open(file))
        return self._opened[1].get_tensor(name)

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
    """Raises one UsageError that lists the expected tensors that are missing or mis-shaped, and those not expected.

    A tensor whose name begins with one of `ignored` may be there.
    """
    ignored = tuple(ignored)
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
