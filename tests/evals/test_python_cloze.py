import random
import re
from collections import Counter

import numpy as np
import pytest

from grlab import errors
from grlab.evals import python_cloze, python_source
from tests.evals.conftest import CONTEXT, ITEMS
from tests.evals.models import by_row, score, uniform

NAMES = {"identifier", "bracket", "indent", "keyword"}


def of_many_lines(documents):
    return max(documents, key=lambda document: document.count(b"\n        if "))


def small(code, context=CONTEXT, kind="identifier"):
    """The sites of one kind in a small document, as (what stands before on the line, site)."""
    source = python_source.parse(code.encode())
    sites = python_cloze.KINDS[kind].find(source, context, random.Random(0))
    return [(code.encode()[: site.offset].rpartition(b"\n")[2], site) for site in sites if site.fits(context)]


# What the items are


def test_four_benchmarks_as_many_items_as_asked_and_spread_over_the_documents(benchmarks, documents):
    assert set(benchmarks) == NAMES
    for name, benchmark in benchmarks.items():
        assert len(benchmark.items) == ITEMS
        assert benchmark.name == name
        assert len({(item.document, item.offset) for item in benchmark.items}) == ITEMS
        given = Counter(item.document for item in benchmark.items)
        if name in ("identifier", "indent"):  # not held up by a rare keyword or bracket
            assert max(given.values()) <= 3
        assert len(given) > 20


def test_an_item_is_the_file_up_to_its_place_and_the_answer_is_what_the_file_says(benchmarks, documents):
    for benchmark in benchmarks.values():
        for item in benchmark.items:
            document, answer = documents[item.document], item.candidates[item.answer]
            assert document[: item.offset].endswith(item.contexts[0])
            assert len(item.contexts[0]) == min(CONTEXT, item.offset)
            assert item.contexts == (item.contexts[0],) * len(item.candidates)
            assert document[item.offset :].startswith(answer)
            assert not any(
                document[item.offset :].startswith(candidate) for candidate in item.candidates if candidate != answer
            )
            assert 1 / len(set(item.candidates)) == benchmark.chance
            assert 1 <= item.evidence <= len(item.contexts[0])
            assert item.evidence + max(map(len, item.candidates)) <= CONTEXT


def test_answers_stand_anywhere_among_the_candidates(benchmarks):
    for benchmark in benchmarks.values():
        places = Counter(item.answer for item in benchmark.items)
        assert len(places) == round(1 / benchmark.chance)
        assert max(places.values()) < 0.6 * ITEMS


def test_there_is_room_for_every_keyword():
    ((_, site),) = small("abcdef\nif x:\n    y\n", kind="keyword")
    assert (site.answer, site.evidence, max(map(len, site.others))) == (b"if ", 7, len("assert "))
    assert site.fits(14)
    assert not site.fits(13)


def test_keywords_count_where_a_space_follows_and_nothing_but_space_comes_before():
    code = "def f():\n    if a or(not b) or c: return\n    elif(d): return e\n    return 1 if f else 2\n"
    found = [(before.strip(), site.answer) for before, site in small(code, kind="keyword")]
    assert found == [(b"", b"if "), (b"if a or(not b)", b"or "), (b"", b"return "), (b"return 1", b"if ")] + [
        (b"return 1 if f", b"else ")
    ]


def test_keywords_out_of_use_are_no_candidates():
    sites = [site for _, site in small("x\ny = a and b or c\n", kind="keyword")]
    shares = [(("inline", word),) for word in ("and", "or", "if", "else")]
    for site in python_cloze._draw_keywords(sites, shares, random.Random(0)):
        assert sorted([site.answer, *site.others]) == [b"and ", b"else ", b"if ", b"or "]


def test_names_were_all_seen_and_are_followed_alike(benchmarks):
    for item in benchmarks["identifier"].items:
        assert len({candidate[-1:] for candidate in item.candidates}) == 1
        evidence = item.contexts[0][len(item.contexts[0]) - item.evidence :]
        for candidate in item.candidates:
            assert re.search(rb"\b" + candidate[:-1] + rb"\b", evidence)


def test_names_in_comments_and_strings_and_builtins_do_not_count():
    code = "alpha = beta1 = gam = eps9 = delta12 = 0\n# remark\nf'{inside}'; 'string'\nself.print = len = alpha\n"
    ((before, site),) = small(code)
    assert before == b"self.print = len = "
    assert site.answer == b"alpha\n"
    assert set(site.others) == {b"gam\n", b"eps9\n", b"delta12\n"}  # beta1 is as long as alpha
    assert small(code.replace("delta12 = ", "")) == []


def test_names_are_looked_for_in_the_context_only_and_leave_room_for_the_candidates():
    code = "ab1 = bcd2 = cdef34 = defg567 = 0\nf(bcd2)\n"
    ((before, site),) = small(code)
    assert (before, site.answer) == (b"f(", b"bcd2)")
    assert site.evidence == site.offset == code.index("f(") + 2
    assert site.stratum == (2, 1)  # two names seen since, one name shorter
    enough = site.evidence + len("defg567)")
    assert len(small(code, context=enough)) == 1
    assert small(code, context=enough - 1) == []
    assert (
        list(python_cloze._identifiers(python_source.parse(code.encode()), site.evidence - 1, random.Random(0))) == []
    )


def test_bracket_evidence_reaches_its_opening(benchmarks):
    for item in benchmarks["bracket"].items:
        closing = item.candidates[item.answer]
        evidence = item.contexts[0][len(item.contexts[0]) - item.evidence :]
        assert evidence[:1] == {b")": b"(", b"]": b"[", b"}": b"{"}[closing]
        assert set(item.candidates) == {b")", b"]", b"}"}


def test_brackets_in_strings_do_not_count_and_short_plain_ones_are_too_easy():
    found = small("x = [f(1), ')', f'{y}', a[1]]  # )\nz = {'a': '}}}}}}'}\n", kind="bracket")
    assert [(before, site.answer, site.stratum[1]) for before, site in found] == [
        (b"x = [f(1), ')', f'{y}', a[1]", b"]", True),
        (b"z = {'a': '}}}}}}'", b"}", False),
    ]


def test_indents_are_one_level_deeper_same_and_shallower(benchmarks):
    for item in benchmarks["indent"].items:
        assert item.contexts[0].endswith(b"\n")
        widths = sorted(len(candidate) - len(candidate.lstrip()) for candidate in item.candidates)
        before = [
            line for line in item.contexts[0][len(item.contexts[0]) - item.evidence :].splitlines() if line.strip()
        ]
        assert widths[1] == len(before[0]) - len(before[0].lstrip())
        assert widths[2] - widths[1] == widths[1] - widths[0] > 0
        assert len({candidate.lstrip() for candidate in item.candidates}) == 1


def test_indents_after_comments_by_two_levels_or_with_tabs_are_passed_over():
    code = "if a:\n  if b:\n    c\n    # remark\n    d\n    e(\n1)\n    f\ng\nif h:\n\tif i:\n\t\tj\n\t\tk\n"
    assert [(site.stratum, site.answer) for _, site in small(code, kind="indent")] == [
        (("deeper",), b"    c"),
        (("same",), b"    e"),
        (("same",), b"    f"),
    ]


def test_a_form_feed_is_no_indent():
    code = "class A:\n    b\n\f\nclass C:\n    d\n\fclass E:\n    f\n    g\n"
    found = [site for _, site in small(code, kind="indent")]
    assert [(site.stratum, site.answer) for site in found] == [(("shallower",), b"class"), (("same",), b"    g")]
    assert set(found[1].others) == {b"g", b"        g"}


def test_keywords_of_one_position_and_followed_by_a_space(benchmarks):
    for item in benchmarks["keyword"].items:
        words = {candidate.decode() for candidate in item.candidates}
        at_start = not item.contexts[0].rpartition(b"\n")[2].strip()
        assert any(words <= {word + " " for word in known} for known in python_cloze.WORDS.values())
        assert item.contexts[0][-1:] in (b" ", b"\n")
        if not at_start:
            assert words <= {word + " " for word in python_cloze.WORDS["inline"]}


def test_places_are_right_after_letters_of_several_bytes():
    start = "é = 'üüü'; ab1 = bcd2 = cdef34 = defg567 = 'ß'; f("
    ((before, site),) = small(start + "bcd2)\n")
    assert before == start.encode()
    assert site.answer == b"bcd2)"


# Balance


def test_uniform_model_gains_nothing_from_ties_and_chance_from_lengths(benchmarks):
    assert score(uniform, benchmarks["bracket"]).accuracy == 0  # three ties
    assert score(uniform, benchmarks["indent"]).accuracy == 1 / 3  # the fewest spaces
    assert score(uniform, benchmarks["identifier"]).accuracy == 1 / 4  # the shortest name
    assert score(uniform, benchmarks["keyword"]).accuracy < 0.4


def test_always_one_bracket_is_at_chance(benchmarks):
    for bracket in b")]}":
        assert score(by_row(lambda row: row[-1] != bracket), benchmarks["bracket"]).accuracy == 1 / 3


def test_same_indent_is_at_chance(benchmarks):
    def other_than_before(row):
        *lines, last = row.split(b"\n")
        margins = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
        return abs(len(last) - len(last.lstrip()) - margins[-1])

    # A line before that goes over several has another margin at its end.
    assert abs(score(by_row(other_than_before), benchmarks["indent"]).accuracy - 1 / 3) < 0.06


def test_name_seen_last_and_longest_name_are_at_chance(benchmarks):
    def distance(row):
        *_, (start, name) = [(match.start(), match[0]) for match in re.finditer(rb"\w+(?=.$)", row, re.DOTALL)]
        return start - max(match.start() for match in re.finditer(rb"\b" + name + rb"\b", row[:start]))

    def shortness(row):
        return -len(re.search(rb"\w+(?=.$)", row, re.DOTALL)[0])

    # Names in comments and strings are seen by the first rule and not counted by the strata.
    assert abs(score(by_row(distance), benchmarks["identifier"]).accuracy - 1 / 4) < 0.06
    assert score(by_row(shortness), benchmarks["identifier"]).accuracy == 1 / 4


def test_most_frequent_keyword_is_near_chance(benchmarks, documents):
    words = [word.encode() for known in python_cloze.WORDS.values() for word in known]
    counts = {word: sum(len(re.findall(rb"\b" + word + rb" ", document)) for document in documents) for word in words}
    items = benchmarks["keyword"].items
    assert abs(score(by_row(lambda row: -counts[row.split()[-1]]), benchmarks["keyword"]).accuracy - 1 / 4) < 0.12
    answers = Counter(item.candidates[item.answer] for item in items)
    assert max(answers.values()) <= 2 * (min(answers.values()) + 1)  # twice: a keyword of both positions


def test_keywords_in_use_hold_equal_shares_and_rare_ones_are_left_out():
    counts = {("inline", word): count for word, count in zip("abcde", (50, 40, 30, 20, 3), strict=True)}
    counts |= {("statement", word): 25 for word in "xyz"}  # too few to offer four
    four = [(("inline", word),) for word in "abcd"]
    assert python_cloze._keywords_in_use(Counter(counts), 80) == four
    assert len(python_cloze._keywords_in_use(Counter({("inline", word): 1 for word in "abcde"}), 80)) == 5
    assert python_cloze._keywords_in_use(Counter(), 80) == []


def test_shares_stay_equal_when_documents_run_short():
    sites = [python_cloze._Site(("a",), i, 1, b"", (), i) for i in range(9)]
    sites += [python_cloze._Site(("b", "plain"), i, 1, b"", (), i) for i in range(3)]
    sites += [python_cloze._Site(("b", "inner"), i, 1, b"", (), i) for i in range(1)]
    shares = [(("a",),), (("b", "inner"), ("b", "plain"))]
    chosen = python_cloze._choose(sites, shares, 20, random.Random(0))
    assert Counter(site.stratum for site in chosen) == {("a",): 4, ("b", "inner"): 1, ("b", "plain"): 3}
    assert len(python_cloze._choose(sites, shares, 5, random.Random(0))) == 5


# Building


def test_building_is_a_function_of_its_arguments(documents):
    some = documents[:12]
    made = python_cloze.build(some, items=16, context=96, seed=1)
    assert made == python_cloze.build(some, items=16, context=96, seed=1)
    assert made == python_cloze.build([np.frombuffer(data, np.uint8) for data in some], items=16, context=96, seed=1)
    other = python_cloze.build(some, items=16, context=96, seed=2)
    assert all(made[name].items != other[name].items for name in made.keys() & other.keys())
    one, other = (python_cloze.build([of_many_lines(documents)], items=16, context=96, seed=seed) for seed in (1, 2))
    assert one["indent"].items != other["indent"].items


def test_documents_that_hold_fewer_items_give_what_they_have_and_say_so(caplog):
    code = b"def f(a):\n    b = [call(a), 11]\n    c = (call[a], 11)\n    d = {call(a), 11}\n    return b\n"
    made = python_cloze.build([code, code], items=50, context=64, seed=0)
    assert Counter(item.candidates[item.answer] for item in made["bracket"].items) == {b")": 2, b"]": 2, b"}": 2}
    assert "benchmark bracket: 6 of the 50 items asked for" in caplog.text
    assert "benchmark keyword: left out" in caplog.text
    assert "keyword" not in made


def test_corpora_that_are_not_python_have_no_benchmarks(caplog):
    prose = [b"It was (so to say) a dark night.\nThe rain fell.\n" * 20, "naïve".encode("latin-1"), b"", b"\xff\xfe\0"]
    assert python_cloze.build(prose, items=4, context=64, seed=0) == {}
    assert caplog.text.count("left out") == 4


def test_no_more_documents_are_read_than_the_limit(documents, monkeypatch):
    monkeypatch.setattr(python_source, "READ_LIMIT", 1)
    made = python_cloze.build([of_many_lines(documents)] * 5, items=4, context=CONTEXT, seed=0)
    assert len({item.document for benchmark in made.values() for item in benchmark.items}) == 1


def test_wrong_arguments_are_refused():
    with pytest.raises(errors.UsageError, match="eval.cloze_items"):
        python_cloze.build([b"x\n"], items=0, context=8, seed=0)
    with pytest.raises(TypeError, match="int32"):
        python_cloze.build([np.zeros(4, np.int32)], items=1, context=8, seed=0)
