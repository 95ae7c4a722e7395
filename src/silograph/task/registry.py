"""All tasks, by name and by the labels that they predict."""

from collections.abc import Mapping

from silograph.graph.graph import LabelForm
from silograph.task.base import Task
from silograph.task.node_labels import LABEL_SET, NODE_CLASS, NODE_VALUE
from silograph.task.rating_value import RATING

TASKS: Mapping[str, Task] = {
    task.name: task for task in (NODE_CLASS, LABEL_SET, NODE_VALUE, RATING)
}
_BY_LABELS = {task.labels: task for task in TASKS.values()}


def task_of(labels: LabelForm) -> Task:
    """Return the task that predicts labels of this form."""
    return _BY_LABELS[labels]
