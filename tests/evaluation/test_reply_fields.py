"""docs/reference/what_leaves_a_silo.md lists every field of replies of evaluation, and no other."""

import re
from pathlib import Path

import torch

from silograph.core.key import Key
from silograph.evaluation.evaluate import ranking_steps, tally_specs
from silograph.federation.program import calls_of
from silograph.graph.graph import LabelForm
from silograph.task.counts import CountRules

RULES = CountRules(5, val_histogram=True)
FORMS: tuple[LabelForm, ...] = ("multiclass", "multilabel", "node_value", "rating")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "what_leaves_a_silo.md"
SIZES = {"": (), "K": (3,), "K, 2, 255": (3, 2, 255)}


def test_the_page_lists_every_field_of_these_replies() -> None:
    """A row of the table is a field of val and test: name, size, dtype, labels that have it."""
    section = PAGE.read_text(encoding="utf-8").partition("## Replies of evaluation")[2]
    section = section.partition("\n## ")[0]
    listed: dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype]] = {}
    for line in section.splitlines():
        if not line.startswith("| `"):
            continue
        names, size, dtype, labels = (cell.strip() for cell in line.split("|")[1:5])
        for name in re.findall(r"`([a-z._]+)`", names):
            for form in FORMS if labels == "all" else labels.split(", "):
                shape = SIZES[size.strip("()").strip()]
                listed[form, name] = shape, getattr(torch, dtype)
    actual = {}
    for form in FORMS:
        specs = dict(tally_specs(form, 1 if form == "rating" else 3, RULES))
        if form == "rating":
            (call,) = calls_of(ranking_steps("own", Key.of(0)))
            specs |= call.reply_specs
        for name, spec in specs.items():
            part, _, field = name.partition(".")
            assert part in ("val", "test")
            actual[form, field] = spec.shape, spec.dtype
    assert listed == actual
