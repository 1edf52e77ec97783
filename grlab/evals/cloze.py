"""Four multiple-choice benchmarks made from held-out Python files, for models of bytes.

An item is a context, the bytes before one place in a file, and a few candidate continuations, one of them what the
file says. The prediction is the candidate of the lowest total nats. A tie for the lowest counts as wrong, so a model
that cannot tell gains nothing from the order of the candidates.

name        asks for                                               candidates                           chance
identifier  recall: which of the names seen in the context comes   4 names of the context               1/4
bracket     nesting: which bracket is to be closed                 ) ] }                                1/3
indent      block structure: how far the next line is indented     one level deeper, same, shallower    1/3
keyword     grammar and use: which keyword stands here             4 keywords of the same position      1/4

What follows is part of a candidate wherever candidates could be prefixes of each other (identifier and keyword: the
byte after it; indent: the first word of the line), and is the same for all candidates of an item.

Balance is by construction: equally many items of each stratum, up to one item, and whole strata only when the
documents run short. The strata, and the rules without understanding that they hold at chance:
- identifier: how many of the other names were seen more recently (0..3) x how many are shorter (0..3): "the name
  seen last" and "the shortest name" both score 1/4.
- bracket: the bracket x whether another bracket was opened after the one to be closed. "Always )" scores 1/3, and
  "close the bracket opened last, be it closed or not" is sure of half the items alone (about 0.7 in all), where the
  documents hold enough of the other half.
- indent: deeper, same, shallower. "Same as the line before" scores 1/3; so does "always the fewest spaces".
- keyword: the keyword; the other candidates are drawn evenly from the same keywords, so any fixed order of
  preference ("the most frequent", "the shortest") scores 1/4 but for the draw.

Limits. A line that ends with a colon gives "deeper" away: "deeper after a colon, else same" scores 2/3 of indent.
Names in the context are told apart also by what they may follow (a dot, "def"), and the name that occurs most often
is the answer more often than chance: identifier is not recall alone. Some keyword items cannot be decided from what
stands before; none of the four is meant to be solved in full. Names are those of code, not of comments and strings;
builtins, `self`, `cls` and names under 3 bytes are no candidates, since a model could know them without the context.
Documents that Python cannot parse are passed over, so the items depend a little on the Python version, as the
standard library itself does.
"""

import ast
import builtins
import io
import itertools
import keyword
import logging
import math
import random
import tokenize
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from grlab import errors
from grlab.evals.loss import NatsFn, nats_in_batches

READ_LIMIT = 4_000_000  # bytes of documents to parse, which takes seconds
SHORTEST_BRACKET = 8  # bytes from a bracket to its close, if no other bracket is opened in them: fewer are too easy
BRACKETS = {")": "(", "]": "[", "}": "{"}
SHIFTS = ("deeper", "same", "shallower")
# Keywords that a space follows, by where they stand: at the start of a statement, or after a space inside one.
WORDS = {
    "statement": "assert class def del elif except for from if import raise return while with yield".split(),
    "inline": "and as else for if import in is not or".split(),
}
NO_CANDIDATES = frozenset(dir(builtins)) | frozenset(keyword.kwlist) | frozenset(keyword.softkwlist) | {"self", "cls"}


class Item(NamedTuple):
    """One question: the bytes before, what may follow, and which of it does.

    The last `evidence` bytes of the context hold what the answer is to be found from; scoring never cuts into them.
    `document` and `offset` say where the answer stands: an index into the documents, and the byte.
    """

    context: bytes
    candidates: tuple[bytes, ...]
    answer: int
    evidence: int
    document: int
    offset: int


class Benchmark(NamedTuple):
    """`chance` is the accuracy of guessing: one over the number of candidates, the same for all items."""

    name: str
    items: tuple[Item, ...]
    chance: float


class Accuracy(NamedTuple):
    """accuracy = correct / items, as a fraction."""

    name: str
    accuracy: float
    correct: int
    items: int
    chance: float


def build(documents: Sequence[bytes | np.ndarray], *, items: int, context: int, seed: int) -> dict[str, Benchmark]:
    """The benchmarks of held-out `documents` (bytes or uint8 arrays), `items` items each, deterministic in all of it.

    A context has at most `context` bytes, and evidence and longest candidate together fit into `context` bytes, so
    that scoring works with any seq_len >= context. Items go round the documents: none gives more than it must. A
    benchmark holds fewer items only if the documents do (the log says how many; of more than READ_LIMIT bytes of
    documents a random part is read), and one without any item, as with documents that are not Python, is left out,
    with a line in the log.
    """
    errors.positive("eval.cloze_items", items)
    errors.positive("eval.cloze_context", context)
    rngs = {name: random.Random(f"cloze/{seed}/{name}") for name in KINDS}  # one benchmark's draws leave the rest alone
    sites: dict[str, list[_Site]] = {name: [] for name in KINDS}
    for index, source in _python(documents, random.Random(f"cloze/{seed}")):
        for name, kind in KINDS.items():
            found = kind.find(source, context, rngs[name])
            sites[name] += [site._replace(document=index) for site in found if site.offset and site.fits(context)]

    benchmarks = {}
    for name, kind in KINDS.items():
        shares = kind.shares(Counter(site.stratum for site in sites[name]), items)
        chosen = _choose(sites[name], shares, items, rngs[name])
        if name == "keyword":
            chosen = _draw_keywords(chosen, shares, rngs[name])
        made = tuple(_item(documents, site, context, rngs[name]) for site in chosen)
        if len(made) < items:
            note = "left out" if not made else f"{len(made)} of the {items} items asked for"
            logging.getLogger(__name__).warning("benchmark %s: %s: the held-out documents hold no more", name, note)
        if made:
            benchmarks[name] = Benchmark(name, made, 1 / kind.choices)
    return benchmarks


def score(nats_fn: NatsFn, benchmark: Benchmark, *, seq_len: int, batch_size: int) -> Accuracy:
    """The accuracy of the model behind `nats_fn`, which sees one shape, [batch_size, seq_len], zeros after the end.

    A row is the context and one candidate; nats are summed over the candidate's bytes alone. All rows of an item have
    the same context, cut on the left where context and longest candidate are more than `seq_len`. UsageError when
    that would cut into an item's evidence.
    """
    spans = []  # of each row: where the candidate's bytes are among the targets
    tokens_NxT = np.zeros((sum(len(item.candidates) for item in benchmark.items), seq_len), np.int32)
    targets_NxT = np.zeros_like(tokens_NxT)
    for item in benchmark.items:
        keep = min(len(item.context), seq_len - max(map(len, item.candidates)))
        if keep < max(item.evidence, 1):
            raise errors.UsageError("seq_len", seq_len, f"too short for {benchmark.name}: at least eval.cloze_context")
        for candidate in item.candidates:
            row = np.frombuffer(item.context[len(item.context) - keep :] + candidate, np.uint8)
            tokens_NxT[len(spans), : len(row) - 1] = row[:-1]
            targets_NxT[len(spans), : len(row) - 1] = row[1:]
            spans.append(slice(keep - 1, len(row) - 1))

    nats = []
    for start, nats_bxT in nats_in_batches(nats_fn, tokens_NxT, targets_NxT, batch_size):
        nats += [math.fsum(nats_T[spans[start + i]]) for i, nats_T in enumerate(nats_bxT)]

    correct, rows = 0, iter(nats)
    for item in benchmark.items:
        of_candidates = list(itertools.islice(rows, len(item.candidates)))
        answer = of_candidates.pop(item.answer)
        correct += all(answer < other for other in of_candidates)  # a tie, or a NaN, is no answer
    count = len(benchmark.items)
    return Accuracy(benchmark.name, correct / count, correct, count, benchmark.chance)


def score_all(
    nats_fn: NatsFn, benchmarks: Mapping[str, Benchmark], *, seq_len: int, batch_size: int
) -> dict[str, Accuracy]:
    """`score` of each benchmark, by name."""
    return {
        name: score(nats_fn, benchmark, seq_len=seq_len, batch_size=batch_size)
        for name, benchmark in benchmarks.items()
    }


def average(accuracies: Mapping[str, Accuracy]) -> float | None:
    """The plain mean of the accuracies, each benchmark counting the same; None when there are none."""
    if not accuracies:
        return None
    return math.fsum(accuracy.accuracy for accuracy in accuracies.values()) / len(accuracies)


# Documents


class _Token(NamedTuple):
    kind: int
    text: str
    start: int  # bytes from the start of the document
    end: int


class _Source(NamedTuple):
    """A document and the tokens of its code: no comments, no blank lines, of an f-string only where it starts."""

    data: bytes
    tokens: list[_Token]

    def statements(self) -> Iterator[list[_Token]]:
        """The logical lines; the last token of each is its NEWLINE."""
        line = []
        for token in self.tokens:
            line.append(token)
            if token.kind == tokenize.NEWLINE:
                yield line
                line = []


def _python(documents: Sequence[bytes | np.ndarray], rng: random.Random) -> Iterator[tuple[int, _Source]]:
    """(index, source) of the documents that are Python in UTF-8, in random order, until READ_LIMIT bytes are read."""
    order = list(range(len(documents)))
    rng.shuffle(order)
    read = 0
    for index in order:
        if read >= READ_LIMIT:
            return
        data = _bytes(documents[index])
        read += len(data)
        if (source := _parse(data)) is not None:
            yield index, source


def _bytes(document: bytes | np.ndarray) -> bytes:
    if isinstance(document, np.ndarray) and document.dtype != np.uint8:
        raise TypeError(f"a document of {document.dtype}: the benchmarks are made from bytes (uint8)")
    return bytes(document)


def _parse(data: bytes) -> _Source | None:
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
            tokens.append(_Token(kind, string, offset(*start), offset(*end)))
        f_strings += starts_f_string - name.endswith("STRING_END")
    if any(data[token.start : token.end] != token.text.encode() for token in tokens):
        return None  # line ends that the tokenizer rewrote: its places are not ours
    return _Source(data, tokens)


# Sites: the places of a document that an item can be made from


_Stratum = tuple
_Share = tuple[_Stratum, ...]


class _Site(NamedTuple):
    stratum: _Stratum
    offset: int  # where the candidates begin
    evidence: int
    answer: bytes
    others: tuple[bytes, ...]  # the candidates beside the answer; of a keyword all that are to be drawn from
    document: int = -1

    def fits(self, context: int) -> bool:
        return self.evidence + max(map(len, (self.answer, *self.others))) <= context


def _brackets(source: _Source, context: int, rng: random.Random) -> Iterator[_Site]:
    opened: list[_Token] = []
    last_opened = None
    for token in source.tokens:
        if token.text in BRACKETS.values():
            opened.append(token)
            last_opened = token
        elif token.text in BRACKETS:
            opener = opened.pop()
            evidence, inner = token.start - opener.start, opener is not last_opened
            if inner or evidence >= SHORTEST_BRACKET:
                others = tuple(bracket.encode() for bracket in BRACKETS if bracket != token.text)
                yield _Site((token.text, inner), token.start, evidence, token.text.encode(), others)


def _indents(source: _Source, context: int, rng: random.Random) -> Iterator[_Site]:
    widths = [0]  # of the blocks that the line before is in
    before: tuple[int, int] | None = None  # where the line before starts and ends
    for line in source.statements():
        first = line[0]
        start = source.data.rfind(b"\n", 0, first.start) + 1
        margin = source.data[start : first.start]
        width = len(margin.rpartition(b"\f")[2])  # Python counts anew after a form feed
        if (
            before is not None
            and len(widths) > 1
            and margin == b" " * width
            and not source.data[before[1] : start].strip()  # a comment between would have its own indentation
            and (first.kind == tokenize.NAME or first.text == "@")
        ):
            same, shallower = widths[-1], widths[-2]
            offered = dict(zip(SHIFTS, (2 * same - shallower, same, shallower), strict=True))
            rows = {shift: b" " * spaces + first.text.encode() for shift, spaces in offered.items()}
            for shift in SHIFTS:
                if offered[shift] == width:
                    others = tuple(row for other, row in rows.items() if other != shift)
                    yield _Site((shift,), start, start - before[0], rows[shift], others)
        while widths[-1] > width:
            widths.pop()
        if widths[-1] < width:
            widths.append(width)
        before = (start, line[-1].end)


def _identifiers(source: _Source, context: int, rng: random.Random) -> Iterator[_Site]:
    names = [
        token
        for token in source.tokens
        if token.kind == tokenize.NAME
        and len(token.text) >= 3
        and token.text not in NO_CANDIDATES
        and not (token.text.startswith("__") and token.text.endswith("__"))
    ]
    first = 0  # the first name of the context
    for index, token in enumerate(names):
        while names[first].start < token.start - context:
            first += 1
        seen = {name.text: name.start for name in names[first:index]}  # where each was seen last
        if token.text not in seen or token.end >= len(source.data):
            continue
        # Of other lengths than the answer: then "the shortest" is one name, and the strata say which.
        others = [name for name in seen if len(name.encode()) != len(token.text.encode())]
        # A few are enough to choose from; all the threes of twenty names would take long.
        offers = defaultdict(list)
        for three in itertools.combinations(rng.sample(others, min(len(others), 5)), 3):
            recent = sum(seen[name] > seen[token.text] for name in three)
            shorter = sum(len(name.encode()) < len(token.text.encode()) for name in three)
            offers[recent, shorter].append(three)
        if offers:
            stratum = rng.choice(sorted(offers))
            three = rng.choice(offers[stratum])
            after = source.data[token.end : token.end + 1]
            earliest = min(seen[name] for name in (token.text, *three))
            yield _Site(
                stratum,
                token.start,
                token.start - earliest,
                token.text.encode() + after,
                tuple(name.encode() + after for name in three),
            )


def _keywords(source: _Source, context: int, rng: random.Random) -> Iterator[_Site]:
    for before, line in itertools.pairwise(source.statements()):
        for token in line:
            position = "statement" if token is line[0] else "inline"
            around = source.data[max(0, token.start - 1) : token.start], source.data[token.end : token.end + 1]
            spaced = around in ((b" ", b" "), (b"\n", b" "))
            if token.kind == tokenize.NAME and token.text in WORDS[position] and spaced:
                evidence = token.start - before[0].start
                others = tuple(word.encode() + b" " for word in WORDS[position] if word != token.text)
                yield _Site((position, token.text), token.start, evidence, token.text.encode() + b" ", others)


def _keywords_in_use(counts: Counter, items: int) -> list[_Share]:
    """The strata of keyword: as many as there can be with an equal share of the items each, rare ones left out.

    If no number of keywords makes up `items`, the number that comes nearest. Positions with under 4 are left out.
    """
    ranked = sorted(counts, key=lambda stratum: (-counts[stratum], stratum))
    reach = {number: min(items, number * counts[ranked[number - 1]]) for number in range(1, len(ranked) + 1)}
    number = max(reach, key=lambda number: (reach[number], number), default=0)
    positions = Counter(position for position, _ in ranked[:number])
    return [(stratum,) for stratum in ranked[:number] if positions[stratum[0]] >= 4]


class _Kind(NamedTuple):
    """How a benchmark is made. `shares(counts of sites by stratum, items)` lists what shares the items equally: each
    is the strata that its sites may be of, the first that has any left going first."""

    find: Callable[[_Source, int, random.Random], Iterator[_Site]]
    choices: int
    shares: Callable[[Counter, int], list[_Share]]


KINDS = {
    "identifier": _Kind(_identifiers, 4, lambda *_: [(cell,) for cell in itertools.product(range(4), range(4))]),
    "bracket": _Kind(_brackets, 3, lambda *_: [((b, i), (b, not i)) for b in BRACKETS for i in (True, False)]),
    "indent": _Kind(_indents, 3, lambda *_: [((shift,),) for shift in SHIFTS]),
    "keyword": _Kind(_keywords, 4, _keywords_in_use),
}


# Items


def _choose(sites: list[_Site], shares: list[_Share], items: int, rng: random.Random) -> list[_Site]:
    """Up to `items` sites, one for each share in turn, each from the document that has given fewest so far.

    When a share runs dry the round it was in is given up: shares stay equal, and the rules they balance at chance.
    """
    pools: dict[_Stratum, dict[int, list[_Site]]] = defaultdict(lambda: defaultdict(list))
    for site in sites:
        pools[site.stratum][site.document].append(site)
    for pool in pools.values():
        for of_document in pool.values():
            rng.shuffle(of_document)
    shares = rng.sample(shares, len(shares))
    given: Counter = Counter()
    chosen: list[_Site] = []
    while shares and len(chosen) < items:
        turn: list[_Site] = []
        for share in shares[: items - len(chosen)]:
            pool = next((pools[stratum] for stratum in share if pools[stratum]), None)
            if pool is None:
                return chosen
            document = min(pool, key=lambda document: given[document])
            given[document] += 1
            turn.append(pool[document].pop())
            if not pool[document]:
                del pool[document]
        chosen += turn
    return chosen


def _item(documents: Sequence[bytes | np.ndarray], site: _Site, context: int, rng: random.Random) -> Item:
    """The item of a site, its candidates in random order."""
    candidates = rng.sample([site.answer, *site.others], 1 + len(site.others))
    before = bytes(documents[site.document][max(0, site.offset - context) : site.offset])
    return Item(before, tuple(candidates), candidates.index(site.answer), site.evidence, site.document, site.offset)


def _draw_keywords(sites: list[_Site], shares: list[_Share], rng: random.Random) -> list[_Site]:
    """Keyword sites with three other candidates each, drawn from the keywords in use at the same position."""
    in_use = {(position, word.encode() + b" ") for ((position, word),) in shares}
    return [
        site._replace(others=tuple(rng.sample([word for word in site.others if (site.stratum[0], word) in in_use], 3)))
        for site in sites
    ]
