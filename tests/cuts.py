"""Partitions by what they do, for tests that go through all of a kind."""

from silograph.graph.partition.partition import PARTITIONERS

OVERLAPPING = {name: part for name, part in PARTITIONERS.items() if part.overlapping}
DISJOINT = {
    name: part
    for name, part in PARTITIONERS.items()
    if not part.overlapping and not part.of_ratings
}
