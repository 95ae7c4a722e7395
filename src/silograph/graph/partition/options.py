"""`CutOptions`: what the ways of cutting a graph leave to choose."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CutOptions:
    """Options of a cut; each way of cutting reads its own and ignores the others.

    Attributes:
        alpha: concentration of `dirichlet`, 0 < alpha <= 1e6; smaller is more skewed.
        favored_classes: classes that `class_biased` favors at each client, 1 to K - 1; None for 2,
            or 1 of two classes.
        favor: how many times as likely they are there, finite and at least 1.
        clients_per_part: clients that `metis_overlapping` draws from each part of METIS.
        part_share: share of a part's nodes that each of them gets, 0 < part_share <= 1.
        share_mean: `shares`: mean of a client's share of all nodes.
        share_variance: `shares`: variance of that share.
        drop_edges: share of every client's internal edges that is lost, 0 to 1; of any cut.
    """

    alpha: float = 0.5
    favored_classes: int | None = None
    favor: float = 10.0
    clients_per_part: int = 5
    part_share: float = 0.5
    share_mean: float = 0.8
    share_variance: float = 0.1
    drop_edges: float = 0.0


DEFAULTS = CutOptions()
FAVORED = 2  # classes that `class_biased` favors where there are more
# The ways of cutting that read an option; every one reads `drop_edges`.
READ_BY: dict[str, tuple[str, ...]] = {
    "alpha": ("dirichlet",),
    "favored_classes": ("class_biased",),
    "favor": ("class_biased",),
    "clients_per_part": ("metis_overlapping",),
    "part_share": ("metis_overlapping",),
    "share_mean": ("shares",),
    "share_variance": ("shares",),
}
