"""The neighbor samplers, by the name that users give: `--neighbors NAME`.

The protocol is in `silograph.nn.mini_batches`, with `full` and `fanout`. Compiled kernels draw
these and `fedgrains` themselves. Every other sampler is drawn in torch, for all clients of a
block at once.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.errors import ConfigError, mistake
from silograph.core.key import Key, mix_words, signed
from silograph.core.payload import State
from silograph.core.setting_values import lin
from silograph.graph.block.block import ClientBlock
from silograph.nn.forward import AnyModel
from silograph.nn.mini_batches import (
    FULL,
    Drawn,
    Fanout,
    Full,
    Neighbors,
    Reached,
    Stateless,
    edge_words,
    edges_of,
    uniform_of,
    weights_of_a_sum,
)
from silograph.sampling.fedgrains import FedGrains, FedGrainsOptions
from silograph.sampling.layer_wise import FastGCN, FastGCNOptions, Ladies, LadiesOptions
from silograph.sampling.options import FanoutOptions

# --- Dropping edges or nodes at random: what samplers that learn are compared with ---------------
#
# Rong, Huang, Xu and Huang, "DropEdge: Towards deep graph convolutional networks on node
# classification", ICLR 2020. A drawn share of the edges is dropped, both directions of an edge
# together, and convolutions scale by the degrees that are left. Here each layer and step draws
# anew: the paper's layer-wise form.
#
# Feng et al., "Graph random neural networks for semi-supervised learning on graphs", NeurIPS
# 2020, section 3.1 (DropNode). A drawn share of the nodes sends no messages, and those of the
# others count 1 / keep. Here a node's own row is never dropped, as it is no message of a
# neighbor.
#
# `bernoulli` drops each message by itself (Fang et al., "DropMessage: Unifying random dropping for
# graph neural networks", AAAI 2023, drops single entries of it).
#
# n: rows. e: edges.


@dataclass(frozen=True, config=STRICT)
class DropOptions:
    """The help text is the documentation of the field."""

    drop: Annotated[float, Field(ge=0, lt=1)] = field(
        default=0.5,
        metadata={"help": "probability with which one is dropped", "tune": lin(0.0, 0.9)},
    )


@dataclass(frozen=True)
class DropEdge(Stateless):
    """Drops edges, both directions together.

    Attributes:
        drop: probability.
    """

    drop: float

    def why_not(self, model: AnyModel) -> str | None:
        """Return a reason unless the model takes edges layer by layer."""
        return edges_by_layer(model)

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Keep edges by a hash that is the same from both ends."""
        del hop, state
        all_edges = edges_of(block, reached.rows)
        is_kept = self._is_kept(block, key, reached.rows[all_edges.position], all_edges.neighbor)
        is_kept_in_block = self._is_kept(block, key, block.adj.row, block.adj.indices.long())
        degree = torch.bincount(block.adj.row[is_kept_in_block], minlength=block.adj.num_rows)
        share = all_edges.share[is_kept]
        return Drawn(
            all_edges.position[is_kept], all_edges.neighbor[is_kept], share, degree.to(share.dtype)
        )

    def _is_kept(self, block: ClientBlock, key: Key, a: Tensor, b: Tensor) -> Tensor:
        """Return which edges between rows a and b (e,) are kept, (e,) bool."""
        row_hashes = mix_words(block.row_key ^ signed(key.value))
        return uniform_of(mix_words(row_hashes[a] + row_hashes[b])) >= self.drop


@dataclass(frozen=True)
class DropNode(Stateless):
    """Drops the messages of nodes.

    Attributes:
        drop: probability.
    """

    drop: float

    def why_not(self, model: AnyModel) -> str | None:
        """Return a reason unless the model takes edges layer by layer."""
        return edges_by_layer(model)

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Keep senders by hashes of their keys."""
        del hop, state
        all_edges = edges_of(block, reached.rows)
        row_hashes = mix_words(block.row_key ^ signed(key.value))
        is_kept = uniform_of(row_hashes[all_edges.neighbor]) >= self.drop
        return Drawn(
            all_edges.position[is_kept],
            all_edges.neighbor[is_kept],
            all_edges.share[is_kept] / (1 - self.drop),
        )


def edges_by_layer(model: AnyModel) -> str | None:
    """Return why a model cannot take other edges in each layer, or None if it can."""
    return None if model.staged is not None else f"{model.noun} sees all edges of a client"


@dataclass(frozen=True)
class Depth:
    """Over how many hops a model sums.

    Attributes:
        hops: how many.
        each: what a hop of the model is called: `layer`, or `hop`.
    """

    hops: int
    each: str


@dataclass(frozen=True)
class NeighborSampler:
    """A neighbor sampler that users can name.

    Attributes:
        name: what they call it.
        title: one line for listings.
        reference: title, authors, venue, year.
        options: frozen dataclass of its own options.
        make: makes the sampler of checked options, for a model of some depth.
        facts: what each figure that it reports of a round is, in one sentence; pages show it.
    """

    name: str
    title: str
    reference: str
    options: type
    make: Callable[[Any, Depth], Neighbors]
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class FullOptions:
    """Options of `full`, which has none."""


@dataclass(frozen=True, config=STRICT)
class BernoulliOptions:
    """The help texts are the documentation of the fields."""

    keep: Annotated[float, Field(gt=0, le=1)] = field(
        default=0.5,
        metadata={"help": "probability with which a neighbor is kept", "tune": lin(0.1, 1.0)},
    )
    rescale: Literal["inverse", "degree"] = field(
        default="inverse",
        metadata={
            "help": "what a kept neighbor counts: inverse (1 / keep, unbiased) or degree "
            "(neighbors / kept ones)"
        },
    )


@dataclass(frozen=True)
class Bernoulli(Stateless):
    """Each neighbor is kept or not, by itself.

    A kept one counts 1 / p, so the sum over neighbors is unbiased; or d / k where k of d neighbors
    were kept (Chen et al., "FedGraph: Federated graph learning with intelligent sampling", IEEE
    TPDS 2022, eq. 7), whose expectation is 1 - (1 - p)^d of the sum.

    Attributes:
        keep: p.
        by_degree: whether a kept neighbor counts d / k.
    """

    keep: float
    by_degree: bool = False

    def why_not(self, model: AnyModel) -> str | None:
        """Return a reason unless the model sums over neighbors with weights."""
        return weights_of_a_sum(model)

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Keep neighbors by hashes of both rows' keys."""
        del hop, state
        all_edges = edges_of(block, reached.rows)
        words = edge_words(block, reached.rows, key, all_edges)
        is_kept = uniform_of(words) <= self.keep
        position, share = all_edges.position[is_kept], all_edges.share[is_kept] / self.keep
        if self.by_degree:
            count = torch.bincount(position, minlength=len(reached.rows))
            degree = block.adj.degree[reached.rows]
            share = degree[position].to(share.dtype) / count[position]
        return Drawn(position, all_edges.neighbor[is_kept], share)


def parse_fanout(text: str, depth: Depth) -> tuple[int, ...]:
    """Return neighbors drawn by hop; a single number holds for every hop, 0 is all.

    Raises:
        ConfigError: not a list of numbers, or not one for each hop.
    """
    words = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,18}", word.strip()) for word in words):
        raise ConfigError(
            f"fanout: expected numbers of neighbors like 10,5, got {text!r}",
            **mistake("option-value", "fanout", text),
        )
    counts = tuple(int(word) for word in words)
    if len(counts) == 1:
        counts *= depth.hops
    if len(counts) != depth.hops:
        raise ConfigError(
            f"fanout: expected one number or {depth.hops} (one for each {depth.each}), got "
            f"{text!r}",
            **mistake("option-value", "fanout", text),
        )
    return counts


def _make_full(options: FullOptions, depth: Depth) -> Full:
    del options, depth
    return FULL


def _make_fanout(options: FanoutOptions, depth: Depth) -> Fanout:
    return Fanout(parse_fanout(options.fanout, depth))


def _make_bernoulli(options: BernoulliOptions, depth: Depth) -> Bernoulli:
    del depth
    return Bernoulli(options.keep, options.rescale == "degree")


def _make_drop_edge(options: DropOptions, depth: Depth) -> DropEdge:
    del depth
    return DropEdge(options.drop)


def _make_drop_node(options: DropOptions, depth: Depth) -> DropNode:
    del depth
    return DropNode(options.drop)


def _make_fedgrains(options: FedGrainsOptions, depth: Depth) -> FedGrains:
    return FedGrains(
        k=options.k,
        hops=depth.hops,
        alpha=options.alpha,
        lr=options.lr,
        learns_z=options.log_z == "learned",
        log_z_lr=options.log_z_lr,
        sampled_degrees=options.degrees == "sampled",
        policy=options.policy,
        width=options.width,
        credit=options.credit,
        score=options.score,
        weighs=options.evaluate == "weighted",
    )


def _make_fastgcn(options: FastGCNOptions, depth: Depth) -> FastGCN:
    del depth
    return FastGCN(options.size)


def _make_ladies(options: LadiesOptions, depth: Depth) -> Ladies:
    del depth
    return Ladies(options.size, options.normalize)


NEIGHBORS: dict[str, NeighborSampler] = {
    sampler.name: sampler
    for sampler in (
        NeighborSampler(
            name="full",
            title="all neighbors",
            reference="what every other sampler estimates",
            options=FullOptions,
            make=_make_full,
        ),
        NeighborSampler(
            name="fanout",
            title="at most so many neighbors of each node, without replacement",
            reference="Hamilton et al., Inductive representation learning on large graphs, "
            "NeurIPS 2017",
            options=FanoutOptions,
            make=_make_fanout,
        ),
        NeighborSampler(
            name="bernoulli",
            title="each neighbor is kept with the same probability",
            reference="Chen et al., FedGraph: Federated graph learning with intelligent "
            "sampling, IEEE TPDS 2022",
            options=BernoulliOptions,
            make=_make_bernoulli,
        ),
        NeighborSampler(
            name="fastgcn",
            title="so many nodes for a layer, by one distribution for all layers",
            reference="Chen et al., FastGCN: Fast learning with graph convolutional networks via "
            "importance sampling, ICLR 2018",
            options=FastGCNOptions,
            make=_make_fastgcn,
        ),
        NeighborSampler(
            name="ladies",
            title="so many nodes for a layer, among the neighbors of the layer after it",
            reference="Zou et al., Layer-dependent importance sampling for training deep and "
            "large graph convolutional networks, NeurIPS 2019",
            options=LadiesOptions,
            make=_make_ladies,
        ),
        NeighborSampler(
            name="drop_edge",
            title="a drawn share of the edges is left out, and of the degrees",
            reference="Rong et al., DropEdge: Towards deep graph convolutional networks on node "
            "classification, ICLR 2020",
            options=DropOptions,
            make=_make_drop_edge,
        ),
        NeighborSampler(
            name="drop_node",
            title="a drawn share of the nodes sends no messages; the others' count more",
            reference="Feng et al., Graph random neural networks for semi-supervised learning on "
            "graphs, NeurIPS 2020",
            options=DropOptions,
            make=_make_drop_node,
        ),
        NeighborSampler(
            name="fedgrains",
            title="each client's own flow network chooses k nodes a layer and step",
            reference="Ceyani et al., FedGrAINS: Personalized subgraph federated learning with "
            "adaptive neighbor sampling, SDM 2025",
            facts={
                "mean_p": "Mean probability of a candidate neighbor, over layers and clients.",
                "score_range": "Range of what a node's neighbors are drawn by, over layers and "
                "clients; below .3 drawing is nearly uniform.",
            },
            options=FedGrainsOptions,
            make=_make_fedgrains,
        ),
    )
}
