"""The server's step over forms of the features: raw, row-normalized, standardized and degrees.

    python benchmarks/defaults/features.py --data-dir ../shared/data

runs the cells that `features.jsonl` does not hold yet, and writes the tables of `features.md`. It
can be stopped and continued at any time; `--max-minutes 0` only writes the page.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import silograph as sg
from silograph.experiment.terminal_table import markdown_table
from silograph.graph.graph import Graph
from silograph.study.paired_tests import Paired, overlap_of, paired_test
from silograph.study.reproduce import replace_section, spread

sys.path.insert(0, str(Path(__file__).parent))

from features_cells import (
    ABSOLUTE,
    CENTRAL,
    CLIENTS,
    COMPARED,
    CUT,
    DEFAULT,
    DENSE,
    FORMS,
    KEYS,
    LARGER_TAU,
    OTHER_MODELS,
    PROTOCOL,
    SETTINGS,
    SMALL,
    TRIED,
    WHERE,
    Line,
    Place,
    formed,
    line_of,
    places,
)

LINES, PAGE = (Path(__file__).with_name(f"features.{end}") for end in ("jsonl", "md"))
SEEDS = range(5)
AIM = 1.5  # points of test accuracy behind centralized training
LEARNS = 0.05  # a reference below this has learned nothing, and its place counts for nothing
GCN = [(dataset, form, "gcn") for dataset, form in WHERE]
At = tuple[str, str, str]  # dataset, form, model


def measure(lines: list[Line], data_dir: str | None, until: float) -> None:
    """Append the cells that are missing."""
    loaded: dict[str, Graph] = {}
    for place in places():
        if found(lines, place) is not None or time.monotonic() >= until:
            continue
        dataset, form = place[:2]
        if dataset not in loaded:
            loaded = {dataset: sg.load(dataset, data_dir=data_dir)}
        lines.append(line_of(formed(loaded[dataset], form), place))
        with LINES.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(*place, f"{lines[-1]['val']:.4f} {lines[-1]['seconds']}", flush=True)


def found(lines: Sequence[Line], place: Place) -> Line | None:
    """Return the line of a cell."""
    wanted = dict(zip(KEYS, place, strict=True))
    return next((line for line in lines if wanted.items() <= line.items()), None)


def together(lines: Sequence[Line], at: At, settings: Sequence[str]) -> dict[str, list[Line]]:
    """Return the lines of settings over the seeds that all of them have, 20 clients."""
    rows = [[found(lines, (*at, 20, setting, seed)) for setting in settings] for seed in SEEDS]
    whole = [[line for line in row if line] for row in rows]
    kept = [row for row in whole if len(row) == len(settings)]
    return {setting: [row[n] for row in kept] for n, setting in enumerate(settings)}


def behind(lines: Sequence[Line], at: At, other: str, part: str) -> Paired:
    """Return how far the default is behind another setting, paired over seeds."""
    of = together(lines, at, (other, DEFAULT))
    overlap = overlap_of(PROTOCOL["split"], None) or 0.0
    scores = [[100 * line[part] for line in of[setting]] for setting in (other, DEFAULT)]
    return paired_test(scores[0], scores[1], "resampled", overlap)


def points(gap: Paired) -> str:
    """Return a mean difference with its 95 % interval from three seeds on."""
    if gap.mean is None:
        return "-"
    text = f"{gap.mean:+.1f}"
    known = gap.n > 2 and gap.low is not None
    return f"{text} ({gap.low:+.1f} to {gap.high:+.1f})" if known else text


def values(of: Sequence[Line], part: str) -> str:
    """Return mean and spread of a score in percent."""
    return spread([line[part] for line in of], 1)


def gaps_table(lines: Sequence[Line], where: Sequence[At], model: bool) -> str:
    """Return the default beside both references, at the best validation round and in the last."""
    heads = ["dataset", "features", *(["model"] if model else []), "seeds"]
    heads += [f"{setting}, {r}" for setting in COMPARED for r in ("best validation", "last round")]
    heads += ["behind centralized", "in validation", "behind it, edges cut"]
    rows = []
    for at in where:
        of = together(lines, at, COMPARED)
        if of[DEFAULT]:
            texts = [values(of[s], part) for s in COMPARED for part in ("test", "last_test")]
            gaps = [behind(lines, at, CENTRAL, part) for part in ("test", "val")]
            gaps.append(behind(lines, at, CUT, "test"))
            name = at if model else at[:2]
            rows.append([*name, str(len(of[DEFAULT])), *texts, *(points(gap) for gap in gaps)])
    return markdown_table(heads, rows)


def verdict(lines: Sequence[Line]) -> str:
    """Return in how many places the aim is met, and for each other one what the edges explain."""
    texts, met, ran, rests = [], Counter[str](), Counter[str](), []
    for at in [*GCN, *OTHER_MODELS]:
        gap, rest = (behind(lines, at, other, "test") for other in (CENTRAL, CUT))
        if gap.mean is None or rest.mean is None or not _learns(lines, at):
            continue
        kind = "GCN" if at[2] == "gcn" else "other models"
        name = f"{at[0]}, {at[1]}" + ("" if at[2] == "gcn" else f", {at[2]}")
        ran[kind] += 1
        met[kind] += gap.mean <= AIM
        rests.append((rest.mean, name))
        if gap.mean > AIM:
            texts.append([name, str(gap.n), points(gap), points(rest)])
    counts = " and ".join(f"{met[kind]} of {ran[kind]} places with {kind}" for kind in ran)
    above = ", ".join(f"{name} ({gap:+.1f})" for gap, name in sorted(rests)[::-1] if gap > AIM)
    text = (
        f"The default is within {AIM} points of centralized training in {counts} (mean test "
        "accuracy, 20 clients, no flag but the form). Behind centralized training without the "
        f"edges between clients it is by more than that in: {above or 'none'}. The places that "
        "miss the aim:\n\n"
    )
    heads = ["features", "seeds", "behind centralized", "behind it, edges cut"]
    return text + markdown_table(heads, texts)


def _learns(lines: Sequence[Line], at: At) -> bool:
    reference = together(lines, at, (CENTRAL, DEFAULT))[CENTRAL]
    return statistics.mean(float(line["test"]) for line in reference) >= LEARNS


def tried_table(lines: Sequence[Line]) -> str:
    """Return validation accuracy of all settings where several ran, seed 0, and their mean."""
    rows = []
    for setting in SETTINGS:
        of = [found(lines, (*at, 20, setting, 0)) for at in TRIED]
        scores = [line["val"] for line in of if line is not None]
        mean = spread([statistics.mean(scores)], 1) if len(scores) == len(of) else "-"
        rows.append([setting, *(values([line], "val") if line else "-" for line in of), mean])
    heads = [f"{d}, {f}" + ("" if m == "gcn" else f", {m}") for d, f, m in TRIED]
    return markdown_table(["setting", *heads, "mean"], rows)


def tau_table(lines: Sequence[Line]) -> str:
    """Return by form how far the default is ahead of other steps, in validation."""
    rows = []
    for other, form in product((LARGER_TAU, ABSOLUTE), FORMS):
        ats = [at for at in (*GCN, *OTHER_MODELS) if at[1] == form]
        gaps = [(behind(lines, at, other, "val").mean, at) for at in ats]
        known = sorted((-gap, at) for gap, at in gaps if gap is not None)
        if known:
            (low, worst), (high, best) = known[0], known[-1]
            mean = f"{statistics.mean(gap for gap, _ in known):+.1f}"
            ends = [
                f"{value:+.1f} ({at[0]}, {at[2]})" for value, at in ((low, worst), (high, best))
            ]
            rows.append([other, form, str(len(known)), mean, *ends])
    return markdown_table(["beside", "features", "places", "mean", "least", "greatest"], rows)


def entry(line: Line | None) -> str:
    """Return test and validation accuracy at the best validation round, and the last round's."""
    if line is None:
        return "-"
    test, val, last = (100 * line[part] for part in ("test", "val", "last_test"))
    return f"{test:.1f} ({val:.1f}), {last:.1f}"


def clients_table(lines: Sequence[Line]) -> str:
    """Return the default and its references by number of clients, seed 0."""
    heads = ["dataset", "features", "setting", *(f"{k} clients" for k in CLIENTS)]
    rows = []
    for (d, f), s in product([*SMALL, (DENSE, "raw")], (ABSOLUTE, DEFAULT, CUT, CENTRAL)):
        texts = [entry(found(lines, (d, f, "gcn", k, s, 0))) for k in CLIENTS]
        if set(texts) != {"-"}:
            rows.append([d, f, s, *texts])
    return markdown_table(heads, rows)


def left_out(lines: Sequence[Line]) -> str:
    """Return which cells have not run."""
    wanted = places()
    missing = [place for place in wanted if found(lines, place) is None]
    told = "; ".join(
        f"{d} {f}, {m}, {k} clients, seed {s}: {count}"
        for (d, f, m, k, s), count in Counter((*p[:4], p[5]) for p in missing).items()
    )
    ran = f"{len(wanted) - len(missing)} of {len(wanted)} cells have run."
    return f"{ran} Not yet run: {told}." if missing else ran


def write_page(lines: Sequence[Line]) -> None:
    """Fill the tables of the page in."""
    sections = {
        "verdict": verdict(lines),
        "tried": tried_table(lines),
        "tau": tau_table(lines),
        "forms": gaps_table(lines, GCN, model=False),
        "models": gaps_table(lines, OTHER_MODELS, model=True),
        "clients": clients_table(lines),
        "feature cells": left_out(lines),
    }
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# Features\n"
    for name, section in sections.items():
        text = replace_section(text, name, section)
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--max-minutes", type=float, default=float("inf"))
    args = parser.parse_args()
    lines = [json.loads(line) for line in LINES.open()] if LINES.exists() else []
    measure(lines, args.data_dir, time.monotonic() + 60 * args.max_minutes)
    write_page(lines)


if __name__ == "__main__":
    main()
