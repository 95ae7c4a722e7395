"""A graph cut as a run would cut it, written as folders of silos."""

import os
import secrets
from pathlib import Path

from silograph.core.config import RunConfig
from silograph.core.numeric_state import standard_numerics
from silograph.experiment.resolve.cutting import load_and_cut
from silograph.experiment.run.progress import best_mode, generating
from silograph.graph.silos.export import check_target, write_silos


@standard_numerics()
def export_silos(
    config: RunConfig, out: str | os.PathLike[str], format: str = "csv"
) -> tuple[Path, ...]:
    """Cut and split the graph of a config, and write one folder a client.

    All get the same new secret, by which they agree on the edges between them.

    Returns:
        The silos' folders, in client order.

    Raises:
        SilographError: something about the config, the graph or the cut cannot be used, or there
            is something at `out`.
    """
    check_target(Path(out), format)  # before a minute of loading
    cut = load_and_cut(config, generating(best_mode()))
    secret = secrets.token_bytes(32)
    return write_silos(out, cut.graph, cut.partition, cut.split, format=format, secret=secret)
