"""What a silo keeps of a run: the model, its own scores, and a page about both.

model.safetensors   the model that the silo predicts with; absent where it gets none
recommender.safetensors  what rates and recommends items to its users, of ratings only
prepared.json       how the raw tables were prepared, of folders that `silograph prepare` made
result.json         the best round, the silo's own scores in it, what was agreed; written last
report.html         the same as a page for people

Scores are worked out here, from the logits of the silo's own nodes that the best round has left in
its state. So nothing travels for them, and they tell nothing of other silos.
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from silograph.core.errors import ConfigError, mistake
from silograph.core.files import check_regular, sync_folder, write_atomic
from silograph.core.key import Key
from silograph.core.payload import State, fields_under, tensors_under
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import PLAIN_WEIGHTS
from silograph.core.text import in_path
from silograph.evaluation.evaluate import TABLES, counts_left, judge_server, rows_left
from silograph.exchange.collect import local_graph, statistics_in
from silograph.experiment.report.page import UNUSED, write_silo_report
from silograph.experiment.resolve.data import complete_block
from silograph.experiment.resolve.exclusions import positive_output, score_request
from silograph.experiment.result_files import (
    MODEL,
    RECOMMENDER,
    REPORT,
    RESULT,
    digest_of,
    digest_of_bytes,
    write_sums,
)
from silograph.experiment.run.recommender import make_recommender
from silograph.experiment.run.trained_model import Preprocessing, TrainedModel
from silograph.federation.session.private_reply import PrivateReplies
from silograph.federation.session.silo_data import Outcome
from silograph.federation.session.state_store import make_private
from silograph.graph.block.block import ClientBlock, kinds
from silograph.graph.column_statistics import EDGE_WEIGHTS, FEATURES
from silograph.graph.graph import Schema, rating_sizes
from silograph.graph.silos.data import Silo
from silograph.graph.silos.prepare import PREPARED
from silograph.methods.base import Method, MethodConfig, client_weights, own_weights
from silograph.nn.conv import Params
from silograph.task.counts import confusion
from silograph.task.decision_scores import decision_scores
from silograph.task.rating_value import RankingModel
from silograph.task.registry import task_of
from silograph.task.scores import PARTS, constant_scores
from silograph.task.threshold import (
    NO_THRESHOLD,
    THRESHOLD,
    DecisionCounts,
    Threshold,
    ThresholdScores,
)

FORMAT = 1  # of a silo's result.json
RESULTS = "results"  # beside the silo's tables, a folder for each run
OF_CLIENTS = "client_mean"  # ends the names of scores that are means over clients


@dataclass(frozen=True, eq=False)
class SiloRun:
    """A run as a silo has agreed to it.

    Attributes:
        silo: its data, with the features of the run.
        config: every default written out.
        method: of the run.
        method_config: what its ops read.
        block: the silo's own rows, where it computes.
        private: noise and charges; None: a run without differential privacy.
    """

    silo: Silo
    config: ResolvedConfig
    method: Method
    method_config: MethodConfig
    block: ClientBlock
    private: PrivateReplies | None = None


def folder_of(results: Path, run: SiloRun, outcome: Outcome) -> Path:
    """Return the folder of a run among the silo's results; it depends on the run only."""
    return results / f"{in_path(run.method.name)}-{outcome.run[:16]}"


def check_result_folder(folder: Path, runs: Collection[str] = ()) -> None:
    """Raise `ConfigError` for a folder that has something already; nothing is overwritten.

    Files of a silo that was killed while it wrote are overwritten. The result of one of `runs`,
    which are not over, may exist: the server sends it again.
    """
    if not os.path.lexists(folder) or _read_result(folder).get("run") in runs:
        return
    file_names = (
        {path.name.removesuffix(".partial") for path in folder.iterdir()}
        if folder.is_dir()
        else {""}
    )
    if not file_names <= {MODEL, RECOMMENDER, PREPARED, REPORT}:
        raise ConfigError(
            f"expected a folder for the result that does not exist yet, got {folder}: choose "
            "another --result, nothing was overwritten",
            **mistake("existing-output", folder),
        )


def has_result(folder: Path, outcome: Outcome) -> bool:
    """Whether a folder has this result already, as after a server that sent it twice.

    Raises:
        ConfigError: it has another one.
    """
    if not os.path.lexists(folder / RESULT):
        return False
    result = _read_result(folder)
    if (result.get("run"), result.get("best_round")) != (outcome.run, outcome.round):
        raise ConfigError(
            f"expected no other result in {folder}, got one: nothing was overwritten",
            **mistake("existing-output", folder),
        )
    return True


def _check_holds_own(folder: Path, run: SiloRun, outcome: Outcome) -> None:
    """Raise `ConfigError` for a result from before the silo took part in its round.

    It has no model of the silo's own, and now there is one in the state, which is dropped else.
    """
    has_own = run.method.own_weights is not None and outcome.state is not None
    if has_own and not _read_result(folder).get("took_part"):
        raise ConfigError(
            f"expected a result with this silo's own model in {folder}, got one without: nothing "
            "was overwritten; the silo's states of the run stay where they are",
            **mistake("existing-output", folder),
        )


def _read_result(folder: Path) -> dict[str, Any]:
    """Return the content of result.json in a folder; {} if it is missing or damaged."""
    check_regular(folder / RESULT)
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def write_result(folder: Path, run: SiloRun, outcome: Outcome, prepared: str | None = None) -> None:
    """Write a silo's result of a finished run.

    Args:
        folder: where it goes.
        run: as the silo has agreed to it.
        outcome: what the server has sent at the end.
        prepared: text of prepared.json, by which `predict` prepares raw tables; None: none.
    """
    if has_result(folder, outcome):
        _check_holds_own(folder, run, outcome)
        return
    make_private(folder)
    os.chmod(folder, 0o700)  # it may have been there, open to others
    sync_folder(folder.parent)  # states are dropped once this returns
    weights, whose = weights_of(run, outcome)
    if weights is not None:
        names, shape = run.silo.class_names, run.method_config.model
        preprocessing = preprocessing_of(run, outcome)
        model = TrainedModel(shape, weights, names, preprocessing, threshold_of(run, outcome))
        model.save(folder / MODEL, private=True)
        _write_recommender(folder, run, outcome, weights)
        if prepared is not None:
            write_atomic(folder / PREPARED, prepared, private=True)
    about = about_run(run, outcome, whose)
    write_silo_report(folder, about)
    text = json.dumps(about, indent=2, allow_nan=False) + "\n"
    others = [name for name in (MODEL, RECOMMENDER, PREPARED) if (folder / name).exists()]
    sums = {name: [digest_of(folder / name)] for name in others}
    sums[RESULT] = [digest_of_bytes(text.encode(errors="backslashreplace"))]
    write_sums(folder, sums, private=True)
    write_atomic(folder / RESULT, text, private=True)


def _write_recommender(folder: Path, run: SiloRun, outcome: Outcome, weights: Params) -> None:
    """Write what recommends items to the silo's users, if it has any and took part."""
    model = run.method_config.model
    if not isinstance(model, RankingModel) or outcome.state is None:
        return
    block = local_graph(run.block, outcome.state)
    with torch.no_grad():
        factors = model.factors(weights, block, tables=fields_under(TABLES, outcome.state))
    make_recommender(factors, block, run.silo.keys, run.silo.scale).save(folder / RECOMMENDER)


def preprocessing_of(run: SiloRun, outcome: Outcome) -> Preprocessing:
    """Return how the silo prepares data for its model: by statistics of all silos, or its own.

    Raises:
        ConfigError: the silo has no state of the run, which holds the statistics of all.
    """
    statistics, mean, config = None, None, run.config
    if config.normalize == "standard_client":
        statistics = run.block.sums[FEATURES].own_statistics().of_client(0)
    statistic_names = [FEATURES] if config.normalize == "standard" else []
    statistic_names += [EDGE_WEIGHTS] if config.edge_weights == "scale" else []
    statistics_by_name = statistics_in(outcome.state or outcome.latest) if statistic_names else {}
    if not statistics_by_name.keys() >= {*statistic_names}:
        raise ConfigError(
            "expected the means and deviations of the run in this silo's state, got no state: "
            "the result is not written, because the model cannot be used without them"
        )
    if config.normalize == "standard":
        statistics = statistics_by_name[FEATURES]
    if config.edge_weights == "scale":
        mean = float(statistics_by_name[EDGE_WEIGHTS].mean)
    names = run.silo.feature_names
    return Preprocessing(
        config.features, config.normalize, names, config.edge_weights, statistics, mean
    )


def threshold_of(run: SiloRun, outcome: Outcome) -> Threshold | None:
    """Return the threshold that the server has handed over with the model, None without one."""
    field, rule = outcome.weights.get(THRESHOLD), run.config.threshold
    if field is None or rule is None or float(field.t) == NO_THRESHOLD:
        return None
    value = float(field.t)
    if not 0 <= value <= 1:  # it comes from the server
        raise ConfigError(f"expected a threshold from 0 to 1 of the server, got {value:g}")
    return Threshold(rule, positive_output(run.config, schema_of_run(run)), value)


def weights_of(run: SiloRun, outcome: Outcome) -> tuple[Params | None, str | None]:
    """Return the weights that the silo predicts with, and whose they are: `server` or `own`."""
    server = tensors_under("weights", outcome.weights)
    if run.method.own_weights is None:
        return (server, "server") if server else (None, None)
    if outcome.state is None or (server_has_model(run) and not server):
        return None, None
    own_params = own_weights(run.method, run.method_config, server, [outcome.state])
    assert own_params is not None  # the method has such weights
    return client_weights(run.method_config.model.weight_shapes, own_params, 0), "own"


def server_has_model(run: SiloRun) -> bool:
    """Whether the server of the run has a model, which it may keep."""
    calls = run.method.calls
    return calls is not None and calls.scores_server(run.method_config)


def about_run(run: SiloRun, outcome: Outcome, whose: str | None) -> dict[str, Any]:
    """Return the content of result.json."""
    split, model = run.block.split, run.method_config.model
    state, views = scored_state(run, outcome)
    sizes = rating_sizes(kinds(run.block.x)) if model.task == "rating" else None
    masks = {"train": split.train, "val": split.val, "test": split.test}
    return {
        "format": FORMAT,
        "run": outcome.run,
        "silo": run.silo.name,
        "method": run.method.name,
        "title": run.method.title,
        "model": model.described(),
        "model_of": whose,
        "server_has_model": server_has_model(run),
        "best_round": outcome.round,
        "recommends": whose is not None
        and outcome.state is not None
        and isinstance(model, RankingModel),
        "took_part": outcome.state is not None,
        "rounds": run.config.rounds,
        "metric": run.config.metric,
        "judge": run.method.evaluate.view,
        "seen": run.method.evaluate.seen(run.config.collect),
        **scores_of(run, state, views),
        **classes_of(run, state, views, threshold_of(run, outcome)),
        "nodes": {"all": len(run.block.y), **{n: int(m.sum()) for n, m in masks.items()}},
        "ratings": sizes,
        "privacy": None if run.private is None else run.private.spent(),
        # The graph and the cut of a simulation have no place here: the silo brought its own data.
        "config": {k: v for k, v in vars(run.config).items() if v is not None and k not in UNUSED},
    }


ScoredViews = Mapping[str, Literal["server", "own"]]


def scored_state(run: SiloRun, outcome: Outcome) -> tuple[State | None, ScoredViews]:
    """Return the state in which the models of the best round are scored, and the views it has.

    Where a model is scored on receipt, the state after round t has scores of the model before, so
    the server's model is scored here. The server view is left out if the server keeps its model.
    """
    state, views = outcome.state, dict[str, Literal["server", "own"]]({"personalized": "own"})
    if not server_has_model(run):
        return state, views
    if state is not None and run.method_config.score_on_receipt == "all":
        if not tensors_under("weights", outcome.weights):
            return state, views
        # The final model is sent without rounding.
        exact_config = replace(run.method_config, sent=PLAIN_WEIGHTS)
        # Statistics of all silos, by which features are standardized, are in the state.
        block, statistics = run.block, statistics_in(state)
        block = complete_block(block, run.silo, statistics) if statistics else block
        state, _ = judge_server(exact_config, block, state, outcome.weights, Key.of(0))
    return state, {"server": "server", **views}


def scores_of(run: SiloRun, state: State | None, views: ScoredViews) -> dict[str, dict[str, Any]]:
    """Return the silo's own scores of `val` and `test` by view; none if it has no such state."""
    scores_by_part: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    if state is None:
        return scores_by_part
    task = task_of(run.method_config.model.task)
    request = score_request(run.config, schema_of_run(run))
    for view, whose in views.items():
        counts = counts_left(run.method_config, run.block, state, whose)
        for part in PARTS:
            scores = task.scores(counts, part, request)
            if scores is not None:
                scores_by_part[part][view] = _without_client_means(scores, run.config.metric)
    return scores_by_part


def schema_of_run(run: SiloRun) -> Schema:
    """Return what the silo's data and its model have in common."""
    model = run.method_config.model
    return Schema(model.features, model.outputs, model.task, run.silo.class_names)


def classes_of(
    run: SiloRun, state: State | None, views: ScoredViews, threshold: Threshold | None
) -> dict[str, Any]:
    """Return test scores of each class, the confusion matrix, and scores of the largest class.

    In the view that picks the round. The matrix is computed from labels and predictions of single
    nodes, and stays here.
    """
    cfg, names = run.method_config, list(run.silo.class_names)
    view = "server" if run.method.evaluate.view == "server" else "personalized"
    if state is None or view not in views or not bool(run.block.split.test.any()):
        return {"by_class": [], "confusion": None, "baseline": None}
    whose = views[view]
    task, counts = task_of(cfg.model.task), counts_left(cfg, run.block, state, whose)
    scores, constant = task.class_scores(counts, "test"), None
    if scores:
        constant = constant_scores(counts, task.labels)
    names = names or [str(k) for k in range(len(scores))]
    matrix = confusion(rows_left(cfg, run.block, state, whose))
    facts: dict[str, Any] = {}
    if task.histograms:
        bins = counts["test.histogram"].cpu().numpy()
        positive = score_request(run.config, schema_of_run(run)).positive
        if (decisions := decision_scores(bins, task.labels, names, positive)) is not None:
            facts["decisions"] = decisions.to_dict()
    if threshold is not None:
        val, test = (
            DecisionCounts.of(
                counts[f"{part}.histogram"][threshold.positive].cpu().double().numpy(),
                threshold.probability,
            )
            for part in PARTS
        )
        scores_of_silo = ThresholdScores(names[threshold.positive], threshold, val, test)
        facts["threshold"] = scores_of_silo.to_dict()
    return {
        **facts,
        "by_class": [{"class": n, **vars(s)} for n, s in zip(names, scores, strict=True)],
        "confusion": None if matrix is None else matrix.tolist(),
        "baseline": constant
        and {"name": task.constant, "scores": _without_client_means(constant, run.config.metric)},
    }


def _without_client_means(
    scores: Mapping[str, float | None], metric: str
) -> dict[str, float | None]:
    """Return scores without means over clients, for a silo is one; `metric` of the run stays."""
    return {n: v for n, v in scores.items() if n == metric or not n.endswith(OF_CLIENTS)}
