"""The page of a silo about a run that it took part in: its own scores and nothing of others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silograph.core.files import write_atomic
from silograph.evaluation.views import means_of
from silograph.experiment.report.page import FIELDS, environment, text_of
from silograph.experiment.result_files import REPORT
from silograph.task.metric_table import metric_of, reported, title_of

VIEWS = ("server", "personalized")
# Of a simulation: which graph it loads, how it cuts it, and what needs it uncut. Silos have theirs.
LOADING = (
    "dataset",
    "data_dir",
    "columns",
    "na_values",
    "scale",
    "rating_scale",
    "largest_component",
    "drop_edges",
)
CUTTING = ("partition", "alpha", "favored_classes", "favor", "clients_per_part", "part_share")
DRAWING = ("share_mean", "share_variance", "share_classes", "partition_seed")
COMPUTING = ("local_bias", "strict", "block_size")
UNUSED = (*LOADING, *CUTTING, *DRAWING, *COMPUTING)


def write_silo_report(folder: Path, about: Mapping[str, Any]) -> None:
    """Write the page into a silo's folder of a run; `about` is what result.json says."""
    write_atomic(folder / REPORT, silo_page(about), private=True)


def silo_page(about: Mapping[str, Any]) -> str:
    """Return the HTML page."""
    names = next((list(scores) for part in ("test", "val") for scores in about[part].values()), [])
    metric_names = sorted(
        reported(names, about["metric"]), key=lambda name: name != about["metric"]
    )
    config = about["config"]
    return (
        environment()
        .get_template("silo.html")
        .render(
            about=about,
            config=config,
            metric=metric_of(about["metric"]),
            names={name: title_of(name) for name in metric_names},
            views=VIEWS,
            means=means_of([about["seen"]]),
            settings={
                n: (text_of(config[n]), FIELDS[n].metadata["help"])
                for n in FIELDS
                if n in config and n not in UNUSED
            },
            axes=[],
            figure_data={},
        )
    )
