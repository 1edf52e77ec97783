"""Reading the text of a compiled program (HLO): computations, instructions, types, and how often its loops run."""

import dataclasses
import math
import re
from collections import defaultdict
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "opaque": 0}  # the others have theirs in their names


class Array(NamedTuple):
    """The type of a value. `space` 0 is HBM, 1 and above are memories on the chip and of the host."""

    dtype: str
    shape: tuple[int, ...]
    space: int

    @property
    def itemsize(self) -> float:
        """Bytes a value; those of the tiles' padding are not counted anywhere."""
        bits = _BITS.get(self.dtype)
        return (int(re.search(r"\d+", self.dtype)[0]) if bits is None else bits) / 8

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def hbm_bytes(self) -> float:
        return self.size * self.itemsize * (self.space == 0)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction; of a tuple `arrays` are its leaves in order."""

    name: str
    op: str  # without the -start, -update or -done of an asynchronous one, which is `phase`
    phase: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    argument: str  # the text between its parentheses
    attributes: str

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute such as `body` names."""
        found = re.search(rf"\b{attribute}=%?([\w.-]+)", self.attributes)
        return found and found[1]


class Computation:
    """Instructions by name, in order."""

    def __init__(self, instructions: list[Instruction], root: str):
        self.by_name = {i.name: i for i in instructions}
        self.root = self.by_name[root]
        self.parameters = sorted((i for i in instructions if i.op == "parameter"), key=lambda i: int(i.argument))
        self.users: dict[str, list[tuple[Instruction, int]]] = defaultdict(list)
        for i in instructions:
            for place, operand in enumerate(i.operands):
                self.users[operand].append((i, place))

    def operand(self, i: Instruction, place: int) -> Instruction:
        return self.by_name[i.operands[place]]

    def source(self, i: Instruction) -> Instruction:
        """What a chain of views is a view of."""
        while i.op in ("bitcast", "reshape", "convert", "copy"):
            i = self.operand(i, 0)
        return i


class Program:
    """A compiled program, of its text (`jax.stages.Compiled.as_text`)."""

    def __init__(self, text: str):
        head = text[: text.find("\n")]
        self.chips = math.prod(int(n) for n in re.findall(r"num_(?:partitions|replicas)=(\d+)", head))
        self.computations, self.entry = _parse(text)
        self.around: dict[Computation, tuple[Computation, Instruction]] = {}  # of a loop's parts: where the loop is
        for outside in self.computations.values():
            for loop in outside.by_name.values():
                if loop.op == "while":
                    for part in ("condition", "body"):
                        self.around[self.computations[loop.called(part)]] = (outside, loop)

    def unfused(self) -> list[Instruction]:
        """The instructions that a chip runs, outside of fusions: their results are arrays in some memory."""
        reached, names = [], [self.entry]
        for name in names:  # grows
            for i in self.computations[name].by_name.values():
                reached.append(i)
                inner = [i.called(a) for a in ("body", "condition")] + ([i.called("to_apply")] * (i.op == "call"))
                names += [n for n in [*inner, *branches(i)] if n and n not in names]
        return reached

    def trips(self, computation: Computation, loop: Instruction) -> int | None:
        """How often a loop runs: by its own mark, or if it counts from one constant to another; else None."""
        if marked := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(marked[1])
        condition, body = (self.computations[loop.called(part)] for part in ("condition", "body"))
        test, before = condition.root, computation.source(computation.operand(loop, 0))
        if (before.op, test.op, body.root.op) != ("tuple", "compare", "tuple") or "direction=LT" not in test.attributes:
            return None
        counter = condition.source(condition.operand(test, 0))
        if counter.op != "get-tuple-element":
            return None
        first = self._constant(computation, computation.operand(before, _index(counter)))
        last = self._constant(condition, condition.operand(test, 1))
        step = body.source(body.operand(body.root, _index(counter)))
        steps = [self._constant(body, body.by_name[name]) for name in step.operands if step.op == "add"]
        step = next((n for n in steps if n), None)
        return None if None in (first, last, step) else -(-(last - first) // step)

    def _constant(self, computation: Computation, i: Instruction) -> int | None:
        """The integer that an instruction gives in every round, of a loop around it too; None: not known."""
        i = computation.source(i)
        if i.op == "constant":
            return int(i.argument) if i.argument.lstrip("-").isdigit() else None
        if i.op != "get-tuple-element" or computation not in self.around:
            return None
        outside, loop = self.around[computation]
        body, before = self.computations[loop.called("body")], outside.source(outside.operand(loop, 0))
        after = body.source(body.operand(body.root, _index(i))) if body.root.op == "tuple" else i
        passed_on = after.op == "get-tuple-element" and _index(after) == _index(i)
        known = passed_on and before.op == "tuple" and computation.operand(i, 0).op == "parameter"
        return self._constant(outside, outside.operand(before, _index(i))) if known else None


def _index(i: Instruction) -> int:
    return int(re.search(r"index=(\d+)", i.attributes)[1])


def branches(i: Instruction) -> list[str]:
    found = re.search(r"branch_computations=\{([^}]*)\}", i.attributes)
    pair = [i.called("true_computation"), i.called("false_computation")]
    return re.findall(r"%?([\w.-]+)", found[1]) if found else [name for name in pair if name]


_TYPE = re.compile(r"(\w+)\[([\d,<=]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*)")
_OP = re.compile(r" ?([a-z][\w-]*)\(")
_PHASE = re.compile(r"(.*)-(start|update|done)")


def _parse(text: str) -> tuple[dict[str, Computation], str]:
    """(computations by name, the name of the entry)."""
    computations, entry, name, instructions, root = {}, "", "", [], ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if line.startswith("}"):
            computations[name] = Computation(instructions, root)
        elif line.endswith("{") and not line[:1].isspace() and not line.startswith("HloModule"):
            name = re.match(r"(?:ENTRY )?%?([\w.-]+)", line)[1]
            entry = name if line.startswith("ENTRY") else entry
            instructions = []
        elif found := _INSTRUCTION.match(line):
            instructions.append(_instruction(found[2], found[3]))
            root = found[2] if found[1] else root
    return computations, entry


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    kind, rest = text[:end], text[end:]
    op = _OP.match(rest)
    close = _closing(rest, op.end() - 1)
    argument, phase = rest[op.end() : close - 1], _PHASE.fullmatch(op[1])
    arrays = []
    for dtype, shape, layout in _TYPE.findall(kind):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(n.removeprefix("<=")) for n in shape.split(",") if n)
        arrays.append(Array(dtype, sizes, int(space[1]) if space else 0))
    operands = () if op[1] in ("parameter", "constant") else tuple(re.findall(r"%([\w.-]+)", argument))
    base, part = (phase[1], phase[2]) if phase else (op[1], "")
    return Instruction(name, base, part, tuple(arrays), operands, argument, rest[close:])


def _closing(text: str, start: int) -> int:
    """The end of the parentheses that open at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i + 1
    raise ValueError(f"unbalanced: {text[start : start + 80]}")
