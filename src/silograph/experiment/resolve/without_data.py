"""What of a config can be checked before its data are known."""

from collections.abc import Sequence
from dataclasses import replace

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.experiment.resolve.exclusions import check_together
from silograph.experiment.resolve.own_partition import names_clients
from silograph.experiment.resolve.parts import with_default_model
from silograph.experiment.resolve.resolve import Resolved, choose, resolve
from silograph.experiment.resolve.run_metric import parse_target
from silograph.experiment.resolve.user_code import is_spec
from silograph.graph.graph import LabelForm, Schema
from silograph.methods.base import Method
from silograph.nn.model_options import RATING_MODELS
from silograph.task.registry import TASKS

MANY = 10**6  # clients, where the data will say how many


def resolved_without_data(
    asked: RunConfig, method: Method | None = None, device: str | None = None
) -> Resolved | None:
    """Return what a run does on data with two features and two classes.

    It fails only where no kind of labels goes with the config. What depends on the data's own
    numbers is looked at by `resolve`, once they are known.

    Args:
        asked: the config.
        method: the method, where it is a value.
        device: where it computes, if not where the config says.

    Returns:
        None for a module of the user's, which may take certain features only.

    Raises:
        ConfigError: the config cannot be used with any data.
    """
    parts = choose(asked, method)
    if asked.clients is None and names_clients(asked.partition):
        asked = replace(asked, clients=MANY)
    if asked.model is not None and is_spec(asked.model):
        check_together(asked, parts, overlapping=parts.partition.part.overlapping)
        return None
    return _first_that_fits(asked, method, device)


def _first_that_fits(asked: RunConfig, method: Method | None, device: str | None) -> Resolved:
    """Return what a run does with the first kind of labels that it can be done with."""
    errors = []
    for labels in _label_forms(asked):
        named = with_default_model(asked, ratings=labels == "rating", method=method)
        try:
            return resolve(named, Schema(2, 2, labels), choose(named, method), device=device)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _label_forms(asked: RunConfig) -> Sequence[LabelForm]:
    """Return the kinds of labels that a model may predict: those that have the metrics, if any."""
    tasks = [
        task
        for task in TASKS.values()
        if asked.model is None or (task.labels == "rating") == (asked.model in RATING_MODELS)
    ]
    target = parse_target(asked.target)
    named = {asked.metric, target and target.metric} - {None, ""}
    fitting = [task for task in tasks if named.issubset(task.metrics)]
    return [task.labels for task in fitting or tasks]
