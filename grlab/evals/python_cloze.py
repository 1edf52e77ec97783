"""Four multiple-choice benchmarks (`grlab.evals.choice`) made from held-out Python files.

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

import builtins
import itertools
import keyword
import logging
import random
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from grlab import errors
from grlab.evals.choice import Benchmark, Item
from grlab.evals.python_source import Source, Token, sources

SHORTEST_BRACKET = 8  # bytes from a bracket to its close, if no other bracket is opened in them: fewer are too easy
BRACKETS = {")": "(", "]": "[", "}": "{"}
SHIFTS = ("deeper", "same", "shallower")
# Keywords that a space follows, by where they stand: at the start of a statement, or after a space inside one.
WORDS = {
    "statement": "assert class def del elif except for from if import raise return while with yield".split(),
    "inline": "and as else for if import in is not or".split(),
}
NO_CANDIDATES = frozenset(dir(builtins)) | frozenset(keyword.kwlist) | frozenset(keyword.softkwlist) | {"self", "cls"}


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
    for index, source in sources(documents, random.Random(f"cloze/{seed}")):
        for name, kind in KINDS.items():
            found = kind.find(source, context, rngs[name])
            sites[name] += [site._replace(document=index) for site in found if site.offset and site.fits(context)]

    benchmarks = {}
    for name, kind in KINDS.items():
        shares = kind.shares(Counter(site.stratum for site in sites[name]), items)
        chosen = kind.draw(_choose(sites[name], shares, items, rngs[name]), shares, rngs[name])
        made = tuple(_item(documents, site, context, rngs[name]) for site in chosen)
        if len(made) < items:
            note = "left out" if not made else f"{len(made)} of the {items} items asked for"
            logging.getLogger(__name__).warning("benchmark %s: %s: the held-out documents hold no more", name, note)
        if made:
            benchmarks[name] = Benchmark(name, made, 1 / kind.choices)
    return benchmarks


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


def _brackets(source: Source, context: int, rng: random.Random) -> Iterator[_Site]:
    opened: list[Token] = []
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


def _indents(source: Source, context: int, rng: random.Random) -> Iterator[_Site]:
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


def _identifiers(source: Source, context: int, rng: random.Random) -> Iterator[_Site]:
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


def _keywords(source: Source, context: int, rng: random.Random) -> Iterator[_Site]:
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


def _draw_keywords(sites: list[_Site], shares: list[_Share], rng: random.Random) -> list[_Site]:
    """Keyword sites with three other candidates each, drawn from the keywords in use at the same position."""
    in_use = {(position, word.encode() + b" ") for ((position, word),) in shares}
    return [
        site._replace(others=tuple(rng.sample([word for word in site.others if (site.stratum[0], word) in in_use], 3)))
        for site in sites
    ]


class _Kind(NamedTuple):
    """How a benchmark is made. `shares(counts of sites by stratum, items)` lists what shares the items equally: each
    is the strata that its sites may be of, the first that has any left going first. `draw` gives the chosen sites their
    candidates, where those depend on the shares."""

    find: Callable[[Source, int, random.Random], Iterator[_Site]]
    choices: int
    shares: Callable[[Counter, int], list[_Share]]
    draw: Callable[[list[_Site], list[_Share], random.Random], list[_Site]] = lambda sites, shares, rng: sites


KINDS = {
    "identifier": _Kind(_identifiers, 4, lambda *_: [(cell,) for cell in itertools.product(range(4), range(4))]),
    "bracket": _Kind(_brackets, 3, lambda *_: [((b, i), (b, not i)) for b in BRACKETS for i in (True, False)]),
    "indent": _Kind(_indents, 3, lambda *_: [((shift,),) for shift in SHIFTS]),
    "keyword": _Kind(_keywords, 4, _keywords_in_use, _draw_keywords),
}


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
    answer = candidates.index(site.answer)
    contexts = (before,) * len(candidates)
    return Item(contexts, tuple(candidates), answer, site.evidence, site.document, site.offset)
