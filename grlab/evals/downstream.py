"""Benchmarks of the field from TFDS, zero-shot: multiple choice, and the last word of a passage.

Prompts follow EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness, its tasks of the
same names), but where a function below says otherwise. A space joins a context and its candidate. No token stands
before the context: a row begins with its text.

The prediction is the candidate of the lowest nats per byte of its text, the joining space not counted: the harness's
acc_norm, but for its characters in place of bytes. Where the candidates are one text (winogrande) or a fixed word each
(boolq) it is that of the lowest nats, as in the harness. A word of lambada counts where each of its tokens is the
model's first choice.

name           dataset                split        candidates
hellaswag      hellaswag              validation   4
piqa           piqa                   validation   2
arc_easy       ai2_arc/ARC-Easy       test         3 to 5
arc_challenge  ai2_arc/ARC-Challenge  test         3 to 5
winogrande     winogrande             validation   2
openbookqa     openbookqa             test         4
boolq          bool_q                 validation   2
lambada        lambada                test         any word

The split is the test set, and the validation set where the answers of the test set are not public.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from grlab import errors
from grlab.data import prepared
from grlab.evals.choice import Benchmark, Item, Rule


def load(names: str, *, items: int, root: Path) -> list[Benchmark]:
    """The benchmarks `names`, separated by commas, from the datasets prepared under `root`; "": none.

    A benchmark holds the first `items` of its split, whose order says nothing of them; all where that is 0.

    Raises:
      UsageError: an unknown name, a dataset that cannot be had, an item without an answer.
    """
    chosen = []
    for name in filter(None, map(str.strip, names.split(","))):
        chosen += ALIASES.get(name, (name,))
    for name in chosen:
        if name not in DATASETS:
            raise errors.unknown("eval.downstream", name, [*DATASETS, *ALIASES])
    return [_load(name, DATASETS[name], items, root) for name in dict.fromkeys(chosen)]


def _load(name: str, dataset: "_Dataset", items: int, root: Path) -> Benchmark:
    field = "eval.downstream"
    builder = prepared.builder(dataset.tfds, root, field=field)
    examples = prepared.examples(builder, dataset.split, name=(field, name), split_field=field)
    made = [dataset.item(examples[i]) for i in range(min(items or len(examples), len(examples)))]
    for item in made:
        if not 0 <= item.answer < len(item.candidates):
            raise errors.UsageError(field, name, f"an item of split {dataset.split!r} has no answer: prepare it anew")
    chance = 0.0 if dataset.rule is Rule.GREEDY else sum(1 / len(item.candidates) for item in made) / len(made)
    return Benchmark(name, tuple(made), chance, dataset.rule)


def _item(context: bytes, texts: list[bytes], answer: int) -> Item:
    """An item whose candidates share their context."""
    return Item((context,) * len(texts), tuple(b" " + text for text in texts), int(answer))


def _asked(question: bytes, texts: list[bytes], answer: int) -> Item:
    return _item(b"Question: %s\nAnswer:" % question, texts, answer)


def _hellaswag(example: Mapping) -> Item:
    """What was begun, after the activity, and its endings, both without WikiHow's marks.

    The harness writes the first word of the context's second sentence with a capital; TFDS does not tell where it is.
    """
    endings = [_without_marks(text) for text in example["endings"]]
    return _item(_without_marks(b"%s: %s" % (example["activity_label"], example["context"])), endings, example["label"])


def _without_marks(text: bytes) -> bytes:
    return re.sub(rb"\[.*?\]", b"", text.strip().replace(b" [title]", b". ")).replace(b"  ", b" ").strip()


def _piqa(example: Mapping) -> Item:
    return _asked(example["goal"], [example["sol1"], example["sol2"]], example["label"])


def _arc(example: Mapping) -> Item:
    choices = example["choices"]
    return _asked(example["question"], list(choices["text"]), list(choices["label"]).index(example["answerKey"]))


def _openbookqa(example: Mapping) -> Item:
    """Asked as a question of ARC is. The harness gives the stem alone; many stems are no questions."""
    question = example["question"]
    return _asked(question["stem"], [question[f"choice_{letter}"] for letter in "ABCD"], example["answerKey"])


def _boolq(example: Mapping) -> Item:
    context = b"%s\nQuestion: %s?\nAnswer:" % (example["passage"], example["question"])
    return _item(context, [b"no", b"yes"], example["answer"])


def _winogrande(example: Mapping) -> Item:
    """Each option stands in the blank, and what follows it is scored: the partial evaluation of arXiv 1806.02847."""
    before, _, after = example["sentence"].partition(b"_")
    contexts = tuple(before + example[option] for option in ("option1", "option2"))
    return Item(contexts, (b" " + after.strip(),) * 2, int(example["label"]))


def _lambada(example: Mapping) -> Item:
    context, _, word = example["passage"].strip().rpartition(b" ")
    return _item(context, [word], 0)


class _Dataset(NamedTuple):
    tfds: str
    split: str
    item: Callable[[Mapping], Item]  # of an example, as TFDS gives it: texts are bytes, classes are numbers
    rule: Rule


DATASETS = {
    "hellaswag": _Dataset("hellaswag", "validation", _hellaswag, Rule.PER_BYTE),
    "piqa": _Dataset("piqa", "validation", _piqa, Rule.PER_BYTE),
    "arc_easy": _Dataset("ai2_arc/ARC-Easy", "test", _arc, Rule.PER_BYTE),
    "arc_challenge": _Dataset("ai2_arc/ARC-Challenge", "test", _arc, Rule.PER_BYTE),
    "winogrande": _Dataset("winogrande", "validation", _winogrande, Rule.TOTAL),
    "openbookqa": _Dataset("openbookqa", "test", _openbookqa, Rule.PER_BYTE),
    "boolq": _Dataset("bool_q", "validation", _boolq, Rule.TOTAL),
    "lambada": _Dataset("lambada", "test", _lambada, Rule.GREEDY),
}
ALIASES = {"ai2_arc": ("arc_easy", "arc_challenge"), "bool_q": ("boolq",)}  # TFDS's own names of what it holds
