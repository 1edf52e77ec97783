"""What a compiled program moves: bytes in a chip's memory, bytes between chips; loops counted as often as they run.

XLA's own cost analysis counts the body of a loop once. Here the text of the optimised program is walked instead.
"""

import dataclasses
import math
import re
from collections import defaultdict

from grlab.hlo import Computation, Instruction, Program, branches

_VIEWS = frozenset("bitcast reshape convert copy get-tuple-element".split())  # in a fusion: the same values, or fewer
_SLICES = frozenset("dynamic-slice slice gather".split())  # of their first operand they read what they return
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # they write this operand into their first, in place
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier domain".split()
)
# Custom calls that move nothing: memory that is reserved, and the marks around an asynchronous collective.
_MARKS = ("AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone", "AssumeGatherIndicesInBound")
# Of the bytes of the operand, how many a chip sends, for groups of g chips.
_SENT = {
    "all-gather": lambda g: g - 1,
    "reduce-scatter": lambda g: (g - 1) / g,
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "all-to-all": lambda g: (g - 1) / g,
    "ragged-all-to-all": lambda g: (g - 1) / g,
    "collective-permute": lambda g: 1,
    "collective-broadcast": lambda g: 1,
}
COLLECTIVES = tuple(_SENT)


@dataclasses.dataclass
class Moved:
    """What one chip moves in one run of a program."""

    hbm_bytes: float = 0.0  # read from and written to HBM
    counts: dict[str, int] = dataclasses.field(default_factory=dict)  # collectives by kind
    sent_bytes: dict[str, float] = dataclasses.field(default_factory=dict)  # by kind: what a chip sends, and receives
    unknown_loops: int = 0  # loops whose trip count was not found: counted once

    def add(self, other: "Moved", times: int = 1) -> None:
        self.hbm_bytes += times * other.hbm_bytes
        for mine, theirs in ((self.counts, other.counts), (self.sent_bytes, other.sent_bytes)):
            for kind, value in theirs.items():
                mine[kind] = mine.get(kind, 0) + times * value
        self.unknown_loops += other.unknown_loops


def moved(program: Program) -> Moved:
    """What one chip moves in one run of `program`."""
    return _Walk(program).of(program.entry)


class _Walk:
    """One walk over a program; a computation that is reached twice is counted once and added twice."""

    def __init__(self, program: Program):
        self.program, self.computations, self.found = program, program.computations, {}

    def of(self, name: str) -> Moved:
        if name not in self.found:
            self.found[name] = self._of(self.computations[name])
        return self.found[name]

    def _of(self, computation: Computation) -> Moved:
        total = Moved()
        collectives: dict[str, list[tuple[Computation, Instruction]]] = defaultdict(list)
        for i in computation.by_name.values():
            if i.phase in ("update", "done"):
                continue  # of what was counted where it began
            if i.op == "while":
                trips = self.program.trips(computation, i)
                total.unknown_loops += trips is None
                for part in ("condition", "body"):
                    total.add(self.of(i.called(part)), trips or 1)
            elif i.op == "conditional":
                total.add(max((self.of(n) for n in branches(i)), key=lambda m: m.hbm_bytes))
            elif i.op in ("call", "async"):
                total.add(self.of(i.called("to_apply") or i.called("calls")))
            elif i.op in _SENT:
                collectives[_channel(i)].append((computation, i))
            else:
                total.hbm_bytes += self._hbm(computation, i)
                for inside, j in self._fused_collectives(i):
                    collectives[_channel(j)].append((inside, j))
        for same in collectives.values():  # an asynchronous one may be spread over several fusions, in loops, too
            if any(_begins(i) for _, i in same):
                self._add_collective(total, same)
        return total

    def _fused_collectives(self, i: Instruction):
        if i.op == "fusion":
            inside = self.computations[i.called("calls")]
            for j in inside.by_name.values():
                if j.op in _SENT and j.phase != "done":
                    yield inside, j
                yield from self._fused_collectives(j)

    def _add_collective(self, total: Moved, same: list[tuple[Computation, Instruction]]) -> None:
        inside, i = same[0]
        group = _group(i, self.program.chips)
        operands = [a for name in i.operands for a in inside.by_name[name].arrays]
        kind, kept = i.op, 1.0
        if kind == "all-reduce" and _is_scattered(inside, i):  # of whose result a chip keeps its slice
            kind, kept = "reduce-scatter", 1 / group
        operand_bytes = sum(a.size * a.itemsize for a in operands)
        on_chip = any(a.space for _, j in same for a in j.arrays if a.shape)
        grown = group if kind == "all-gather" else kept
        hbm_bytes = sum(a.hbm_bytes for a in operands) + (0 if on_chip else operand_bytes * grown)
        total.add(Moved(hbm_bytes, {kind: 1}, {kind: operand_bytes * _SENT[kind](group)}))

    def _hbm(self, computation: Computation, i: Instruction) -> float:
        """Bytes that an instruction reads from and writes to HBM."""
        if i.op in _FREE or any(f'"{mark}"' in i.attributes for mark in _MARKS):
            return 0.0
        sources = [computation.by_name[name].arrays for name in i.operands]
        if i.op == "fusion":
            inside = self.computations[i.called("calls")]
            read = sum(
                self._read(inside, p) * a.itemsize
                for p, arrays in zip(inside.parameters, sources, strict=True)
                for a in arrays
                if a.space == 0
            )
            written = zip(i.arrays, self._written(inside, inside.root), strict=True)
            return read + sum(size * a.itemsize for a, size in written if a.space == 0)
        # An asynchronous copy returns (to, from, ..), other asynchronous operations ((operands), to, ..).
        to = i.arrays
        if i.phase:
            to = to[:1] if i.op == "copy" else to[sum(map(len, sources)) :][:1]
        if i.op in _SLICES:
            others = sum(a.hbm_bytes for arrays in sources[1:] for a in arrays)
            return others + sum(a.size * a.itemsize * ((a.space == 0) + (sources[0][0].space == 0)) for a in to)
        if i.op in _UPDATES:
            update = sources[_UPDATES[i.op]][0]
            return update.hbm_bytes + update.size * update.itemsize * (to[0].space == 0)
        return sum(a.hbm_bytes for arrays in sources for a in arrays) + sum(a.hbm_bytes for a in to)

    def _read(self, inside: Computation, i: Instruction) -> int:
        """How many of the values of `i` a fused computation looks at."""
        size, seen = sum(a.size for a in i.arrays), 0
        for user, place in inside.users[i.name]:
            if user.op == "tuple" or user.op in _SENT or (user.op in _UPDATES and place == 0):
                continue  # passed on, or written in place; a collective is counted by itself
            if user.op in _SLICES and place == 0:
                seen += user.arrays[0].size
            elif user.op == "fusion":
                callee = self.computations[user.called("calls")]
                seen += self._read(callee, callee.parameters[place])
            elif user.op in _VIEWS and user is not inside.root:
                seen += self._read(inside, user)
            else:
                return size
        return min(size, seen)

    def _written(self, inside: Computation, i: Instruction) -> list[int]:
        """How many values of each array of `i`, a fused computation's result, are written."""
        if i.op == "tuple":
            return [size for name in i.operands for size in self._written(inside, inside.by_name[name])]
        source = inside.source(i)
        if source.op in _UPDATES:
            return [inside.operand(source, _UPDATES[source.op]).arrays[0].size]
        if source.op in _SENT or (source.op == "parameter" and source.arrays[0].dtype == i.arrays[0].dtype):
            return [0] * len(i.arrays)
        if source.op == "fusion":
            callee = self.computations[source.called("calls")]
            return self._written(callee, callee.root)
        return [a.size for a in i.arrays]


def _channel(i: Instruction) -> str:
    found = re.search(r"channel_id=(\d+)", i.attributes)
    return found[1] if found else i.name


def _begins(i: Instruction) -> bool:
    """Whether a collective is whole, or the first part of one that the TPU compiler spreads over fusions."""
    found = re.search(r'"async_collective_fusion_config":\{"flag_start":"(-?\d+)"', i.attributes)
    return found is None or found[1] == "-1"


def _is_scattered(inside: Computation, i: Instruction) -> bool:
    """Whether an all-reduce is followed by the slice of each chip: how a TPU's program has a reduce-scatter."""
    users = [user for user, _ in inside.users[i.name]]
    while len(users) == 1 and users[0].op in ("bitcast", "reshape"):
        users = [user for user, _ in inside.users[users[0].name]]
    return len(users) == 1 and users[0].op == "dynamic-slice"


def _group(i: Instruction, chips: int) -> int:
    """How many chips take part in one instance of a collective."""
    text = i.attributes.partition("replica_groups=")[2]
    if found := re.match(r"\{\{([\d,]+)\}", text):
        return found[1].count(",") + 1
    if found := re.match(r"\[\d+,(\d+)\]", text):
        return int(found[1])
    if found := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\S+)? \{([^}]*)\}", text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])  # an axis, or a part of one
        return math.prod(int(part or sizes[name]) for name, part in axes)
    return chips
