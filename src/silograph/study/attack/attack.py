"""What attacks recover from a run, by simulation: the server's view, judged by the silos' data."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.numeric_state import standard_numerics
from silograph.core.payload import Shared, with_prefix
from silograph.evaluation.evaluate import server_counts
from silograph.experiment.run.setup import Setup, first_weights, prepare
from silograph.experiment.terminal_table import markdown_table
from silograph.graph.block.block import ClientBlock
from silograph.graph.datasets import source_of
from silograph.graph.graph import Graph
from silograph.nn.model import Model
from silograph.study.attack.attacks import (
    CRAFTED,
    Finding,
    RecordingFederation,
    attack_features,
    attack_first_weights,
    attack_labels,
    attack_separable_rows,
    attack_test_counts,
    attack_with_crafted_weights,
    features,
    first_map,
    record_server_view,
)
from silograph.task.counts import BINS, STEEPNESS, CountRules, bins_of, log_odds
from silograph.task.least_count import spread_bins

# --- from evaluations ----------------------------------------------------------------------------
# Attacks on replies of evaluation: an active server that has weights of its own making scored.
#
# Labels: the server knows features and edges of test nodes, so it knows the bins of each node
# under any weights. Each histogram of a class then says which share of the nodes near a bin have
# the class, and a few random models single out each node's own.
#
# Features: the server knows nothing of the nodes. Under weights that add up features, the score
# of one node is above all others. It is above by more, if weights of a feature are raised that
# the node has; so the highest occupied bin tells the node's features, one in each evaluation.
#
# C: silos. F: features. K: classes. B: bins. T: evaluations. j: test nodes.


LABEL_CALLS = 12
FEATURE_CALLS = 100  # about as many as a run has rounds
TRIALS = 10  # evaluations in which a node is looked for that stands apart
SURE = 0.99
SPREAD = 0.3  # deviation of log-odds, which fills most bins
LINEAR = 4 * SPREAD  # bias of hidden units: nearly all are above 0
MADE = "have crafted weights scored"


def evaluation_findings(setup: Setup, block: ClientBlock) -> list[Finding]:
    """Return what evaluations of crafted weights tell; none where no such weights are known here.

    Args:
        setup: of a run.
        block: all silos' own data, by which the attacks are judged.
    """
    cfg, calls = setup.method_config, setup.method.calls
    model = cfg.model
    fits = isinstance(model, Model) and model.conv in ("gcn", "mlp") and model.layers == 2
    scored = calls is not None and calls.scores_server(cfg) and not setup.method.evaluate.crosses
    if not fits or not scored or setup.schema.task != "multiclass":
        return []
    return [*_labels(setup, block), *_features(setup, block)]


def _scored(setup: Setup, key: Key) -> "ScoredNodes":
    fed = RecordingFederation(setup.federation)
    setup.method.init(fed, setup.method_config, first_weights(setup), key)
    return ScoredNodes(fed, key, setup.method_config.count_rules)


class ScoredNodes:
    """Silos that evaluate weights, and a server that reads their replies.

    Args:
        fed: the silos.
        key: of the calls.
        rules: what the replies hold.
    """

    def __init__(self, fed: RecordingFederation, key: Key, rules: CountRules) -> None:
        self._fed, self._key, self._rules = fed, key, rules

    def reply(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the counts of each silo, (C, ...)."""
        inbox = {name: Shared(w) for name, w in with_prefix("weights", weights).items()}
        server_counts(self._fed, inbox, self._key, self._rules)
        return {name: field.t for name, field in self._fed.calls[-1].reply.items()}


def _labels(setup: Setup, block: ClientBlock) -> list[Finding]:
    key = Key.of(setup.config.seed).fold("attack labels")
    cfg, silos = setup.method_config, _scored(setup, key)
    test = block.split.test.nonzero()[:, 0]
    y, client = block.y[test], block.client[test]
    replies_and_bins = []
    for call in range(LABEL_CALLS):
        weights = dict(cfg.model.init_weights(key.fold("call", call), first_dtype(setup)))
        odds = log_odds(cfg.backend.predict(cfg.model, weights, block)[test], "multiclass")
        scale = SPREAD / max(float(odds.std(0).mean()), 1e-9)
        weights |= {name: w * scale for name, w in weights.items() if name.startswith("1.")}
        logits = cfg.backend.predict(cfg.model, weights, block)[test]
        bins = bins_of(log_odds(logits, "multiclass"), cfg.model.outputs)
        replies_and_bins.append((silos.reply(weights), bins))
    min_count = cfg.count_rules.min_count
    prior = label_shares([reply for reply, _ in replies_and_bins])
    chances = torch.stack(
        [chances_of(reply, bins, client, prior, min_count) for reply, bins in replies_and_bins]
    ).log()
    logs = chances.sum(0) - (LABEL_CALLS - 1) * prior[client].log()
    shares = logs.nan_to_num(nan=-1e9, neginf=-1e9).softmax(dim=1)
    confidence, predictions = shares.max(dim=1)
    is_sure = confidence >= SURE
    what = f"labels of test nodes whose features and edges are known, {LABEL_CALLS} evaluations"
    accuracy = float((predictions == y)[is_sure].double().mean()) if bool(is_sure.any()) else None
    return [Finding(MADE, what, float(is_sure.double().mean()), len(y), accuracy, "active")]


def first_dtype(setup: Setup) -> torch.dtype:
    """Return the dtype of the run's weights."""
    return next(iter(first_weights(setup).values())).dtype


def label_shares(replies: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the share of test nodes of each class at each silo, (C, K) float64; not all 0."""
    class_counts = torch.stack([reply["test.tp"] + reply["test.fn"] for reply in replies]).amax(0)
    shares = class_counts.double() + 1
    return shares / shares.sum(1, keepdim=True)


def chances_of(
    reply: Mapping[str, Tensor], bins: Tensor, client: Tensor, prior: Tensor, min_count: int
) -> Tensor:
    """Return how likely each class is for each node by one reply, (j, K) float64.

    Args:
        reply: counts of all silos, with histograms (C, K, 2, B).
        bins: (j, K) of the nodes.
        client: (j,) their silos.
        prior: (C, K) float64, for classes of which no histogram came.
        min_count: the least count of the run.
    """
    table = reply["test.histogram"]
    merges = "test.merged.tp" in reply
    guess = prior[client].clone()
    for silo in client.unique().tolist():
        rows = (client == silo).nonzero()[:, 0]
        for k in range(bins.shape[1]):
            if not bool(table[silo, k].any()):
                continue
            own, true = bins[rows, k], table[silo, k, 1].double()
            nodes = torch.bincount(own, minlength=BINS).double()
            if merges:  # near a bin, and not quite sure
                true = spread_bins(table[silo : silo + 1, k : k + 1], min_count)[0, 1]
                true, nodes = smooth(true) + prior[silo, k], smooth(nodes) + 1
            guess[rows, k] = (true / nodes.clamp(min=1e-9))[own].clamp(max=1)
    return guess


def smooth(counts: Tensor, width: int = 3) -> Tensor:
    """Return the sums (B,) of counts within some bins of each bin."""
    ones = counts.new_ones(1, 1, 2 * width + 1)
    return torch.nn.functional.conv1d(counts[None, None], ones, padding=width)[0, 0]


def _features(setup: Setup, block: ClientBlock) -> list[Finding]:
    key = Key.of(setup.config.seed).fold("attack features")
    cfg, silos = setup.method_config, _scored(setup, key)
    inputs = features(block).double()
    if setup.config.model != "mlp" or not bool((inputs != 0).any()):
        return []  # sums over neighbors have features of many nodes
    entry = float(inputs[inputs != 0].abs().median())  # the server knows such data
    silo = int(block.count(block.split.test).argmax())
    trials = []
    for trial in range(TRIALS):
        u = key.fold("trial", trial).matrix(inputs.shape[1], 1)[:, 0] - 0.5
        u = u / max(float((inputs @ u).std()), 1e-9) * SPREAD
        top, second = highest(silos.reply(linear_score_weights(setup, u)), silo)
        trials.append((score_at(top) - score_at(second), u, top))
    gap, u, top = max(trials, key=lambda trial: trial[0])
    rows = block.split.test & (block.client == silo)
    scores = cfg.backend.predict(cfg.model, linear_score_weights(setup, u), block)[:, 0]
    order = scores.masked_fill(~rows, -torch.inf).argsort(descending=True)
    target = int(order[cfg.count_rules.min_count // 2])  # in the middle of the highest group
    tested_features = (inputs != 0).sum(0).argsort(descending=True)[:FEATURE_CALLS]
    score_rose = []
    for feature in tested_features.tolist():
        raised_weights = u.clone()
        raised_weights[feature] += gap / 2 / entry  # not so far that others come by
        score_rose.append(
            highest(silos.reply(linear_score_weights(setup, raised_weights)), silo)[0] > top
        )
    predicted, is_present = torch.tensor(score_rose), inputs[target][tested_features] != 0
    what = f"features of one test node, {len(tested_features)} evaluations"
    accuracy = float((predicted == is_present).double().mean())
    share_right = float(predicted[is_present].double().mean()) if bool(is_present.any()) else 0.0
    return [Finding(MADE, what, share_right, int(is_present.sum()), accuracy, "active")]


def linear_score_weights(setup: Setup, u: Tensor) -> dict[str, Tensor]:
    """Return weights under which the score of class 0 of a row x (F,) without neighbors is x u.

    The logits of all other classes are 0, so the log-odds of class 0 is that and a bias.
    """
    shapes, dtype = setup.method_config.model.weight_shapes, first_dtype(setup)
    hidden, classes = shapes["1.weight"]
    assert hidden is not None  # of a model that is known
    out = torch.zeros(hidden, int(classes or 0), dtype=dtype)
    out[:, 0] = 1 / hidden
    bias = torch.zeros(out.shape[1], dtype=dtype)
    return {
        "0.weight": u[:, None].to(dtype).expand(-1, hidden).contiguous(),
        "0.bias": torch.full((hidden,), LINEAR, dtype=dtype),
        "1.weight": out,
        "1.bias": bias,
    }


def highest(reply: Mapping[str, Tensor], silo: int) -> tuple[int, int]:
    """Return the two highest occupied bins of class 0 at a silo, 0 for one that does not exist."""
    occupied = reply["test.histogram"][silo, 0].sum(dim=0).nonzero()[:, 0].tolist()
    second, first = [0, 0, *occupied][-2:]
    return first, second


def score_at(place: int) -> float:
    """Return the log-odds in the middle of a bin, less those of a model that knows nothing."""
    v = 2 * (place + 0.5) / BINS - 1
    return v / (1 - abs(v)) / STEEPNESS


COLUMNS = ("attack", "what is recovered", "share", "right", "server")
UNMEASURED = (
    "Not measured: weights that an active server crafts. The attack here needs --optimizer sgd, "
    "one local step and a two-layer gcn under fedavg or fedopt; other settings stop it, and not a "
    "server that crafts for them."
)
NOTHING = "no attack that silograph knows applies to this run, which does not make it safe"
MOST_STEPS = 200
ALL = 10**9  # clients in a block


@standard_numerics()
def attack(config: RunConfig, graph: Graph | None = None) -> list[Finding]:
    """Simulate a run and return what attacks recover from it; none if none applies.

    Args:
        config: the run; its rounds are as many as the attacks need.
        graph: its data, if not what the config names.

    Raises:
        SilographError: the run cannot be set up, or its method does not train at silos.
    """
    data = source_of(config).read(config.scale) if graph is None else graph
    setup = prepare(dataclasses.replace(config, block_size=ALL), data)
    if setup.method.setting.uncut:
        raise ConfigError(
            f"expected a method that trains at silos to attack, got {setup.method.name}, which "
            "trains on the uncut graph in simulation only: choose another method"
        )
    seen = record_server_view(setup, rounds_of(setup))
    block = seen.blocks[0]
    return [
        *attack_features(seen, setup, block),
        *attack_separable_rows(seen, setup, block),
        *attack_labels(seen, setup, block),
        *attack_first_weights(seen, setup, block),
        *attack_with_crafted_weights(setup, block),
        *attack_test_counts(seen),
        *evaluation_findings(setup, block),
    ]


def write_findings(findings: Sequence[Finding], config: RunConfig, folder: Path) -> None:
    """Write `attack.json` and `attack.md` into a new folder.

    Raises:
        ConfigError: the folder exists.
    """
    if folder.exists():
        raise ConfigError(f"expected a folder to make, got {folder}, which exists: use another")
    folder.mkdir(parents=True)
    rows = [dataclasses.asdict(finding) for finding in findings]
    text = json.dumps({"method": config.method, "findings": rows}, indent=1)
    (folder / "attack.json").write_text(text + "\n", encoding="utf-8")
    page = f"# What a server recovers from {config.method} on {config.dataset}\n\n"
    table = (
        markdown_table(COLUMNS, [finding_row(finding) for finding in findings])
        if findings
        else NOTHING
    )
    notes = "".join(f"\n{line}\n" for line in unmeasured_notes(findings))
    (folder / "attack.md").write_text(page + table + "\n" + notes, encoding="utf-8")


def unmeasured_notes(findings: Sequence[Finding]) -> list[str]:
    """Return a note on an attack that could not be tried, or nothing."""
    return [] if any(finding.attack == CRAFTED for finding in findings) else [UNMEASURED]


def finding_row(finding: Finding) -> list[str]:
    """Return a finding as the texts of `COLUMNS`."""
    precision = "-" if finding.right is None else f"{100 * finding.right:.1f} %"
    count = f"{100 * finding.share:.1f} % of {finding.of:,}"
    return [finding.attack, finding.recovered, count, precision, finding.server]


def rounds_of(setup: Setup) -> int:
    """Return how many rounds give as many equations as there are features, at most a few."""
    if setup.method.rows == "none":
        return 1
    width = setup.method_config.model.weight_shapes[first_map(setup)][1]
    rounds = -(-setup.schema.num_features // width) + 2
    rate = float(getattr(setup.method_config.options, "rate", 1.0))
    return min(int(rounds / rate), MOST_STEPS)
