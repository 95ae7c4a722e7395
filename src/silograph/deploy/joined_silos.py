"""What a server looks at when its silos have joined: their versions, the order of names."""

import logging
import re
from typing import TYPE_CHECKING

from silograph.core.errors import ConfigError
from silograph.deploy.silo import read_versions
from silograph.experiment.run.setup import versions
from silograph.experiment.run.snapshot import NUMERIC

if TYPE_CHECKING:
    from silograph.federation.session.hub import Joined

LOG = logging.getLogger("silograph")


def check_versions(silo: "Joined") -> None:
    """Raise `ConfigError` unless a silo has the server's silograph; warn of other differences."""
    theirs, ours = read_versions(silo.name, silo.facts), versions()
    if theirs.get("silograph") != ours["silograph"]:
        raise ConfigError(
            f"expected silograph {ours['silograph']} at {silo.name}, as at the server, got "
            f"{theirs.get('silograph')}: install the same version"
        )
    for name in NUMERIC:
        if theirs.get(name) != ours.get(name):
            LOG.warning(
                "%s has %s %s, the server %s: numbers may differ in the last bits",
                silo.name,
                name,
                theirs.get(name),
                ours.get(name),
            )


def natural(name: str) -> list[tuple[int, str]]:
    """Return what names are sorted by: numbers in them by their value.

    >>> sorted(["silo_10", "silo_9"], key=natural)
    ['silo_9', 'silo_10']
    """
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
