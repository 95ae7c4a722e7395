"""The models, by the name that users give, with their options; nothing here needs torch.

`silograph.nn.model.MODELS` has what each of them computes.
"""

from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT, Count
from silograph.core.setting_values import log

Head = Literal["conv", "linear"]
RESIDUAL = {"help": "add a hidden layer's input to its output (from 3 layers on)"}
DropShare = Annotated[float, Field(ge=0, lt=1)]
INPUT_DROPOUT = {"help": "share of the features dropped in training"}
HEAD = {"help": "the last layer: conv as the others, or linear, a classifier on top of them"}


@dataclass(frozen=True, config=STRICT)
class LayerOptions:
    """Options of models that are convolutions alone."""

    residual: bool = field(default=False, metadata=RESIDUAL)
    input_dropout: DropShare = field(default=0.0, metadata=INPUT_DROPOUT)
    head: Head = field(default="conv", metadata=HEAD)


@dataclass(frozen=True, config=STRICT)
class MLPOptions:
    """All layers are linear, so there is no head to choose."""

    residual: bool = field(default=False, metadata=RESIDUAL)
    input_dropout: DropShare = field(default=0.0, metadata=INPUT_DROPOUT)


@dataclass(frozen=True, config=STRICT)
class GATOptions:
    """The defaults are those of the paper."""

    residual: bool = field(default=False, metadata=RESIDUAL)
    input_dropout: DropShare = field(default=0.0, metadata=INPUT_DROPOUT)
    head: Head = field(default="conv", metadata=HEAD)
    heads: Count = field(default=8, metadata={"help": "attention heads"})
    attention_dropout: DropShare = field(
        default=0.0, metadata={"help": "share of the attention to neighbors dropped in training"}
    )


@dataclass(frozen=True, config=STRICT)
class APPNPOptions:
    """The defaults are those of the paper."""

    residual: bool = field(default=False, metadata=RESIDUAL)
    input_dropout: DropShare = field(default=0.0, metadata=INPUT_DROPOUT)
    hops: Count = field(default=10, metadata={"help": "propagation steps"})
    teleport: Annotated[float, Field(ge=0, le=1)] = field(
        default=0.1, metadata={"help": "share of the prediction kept in a step"}
    )


EMBEDDING = {"help": "width of a client's embeddings of users and items"}
ITEMS = {
    "help": "rows of the table of items that travels, with methods that average it: items take one "
    "by a hash of their key; 0: items stay with the client"
}
MOST_ROWS = 2**24
ItemRows = Annotated[int, Field(ge=0, le=MOST_ROWS)]
Terms = Literal["biases", "mean"]
TERMS = {"help": "what is added to a silo's mean: biases, or mean alone"}
SocialWeight = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, config=STRICT)
class RatingGCNOptions:
    """The default is that of the paper."""

    embedding: Count = field(default=64, metadata=EMBEDDING)
    items: ItemRows = field(default=0, metadata=ITEMS)


@dataclass(frozen=True, config=STRICT)
class RatingGATOptions:
    """The defaults are those of the paper."""

    embedding: Count = field(default=64, metadata=EMBEDDING)
    items: ItemRows = field(default=0, metadata=ITEMS)
    heads: Count = field(default=2, metadata={"help": "attention heads"})


@dataclass(frozen=True, config=STRICT)
class RatingFactorsOptions:
    """See `silograph.nn.rating_factors`."""

    embedding: Count = field(default=16, metadata=EMBEDDING)
    items: ItemRows = field(default=0, metadata=ITEMS)
    terms: Terms = field(default="biases", metadata=TERMS)


@dataclass(frozen=True, config=STRICT)
class SocialFactorsOptions:
    """Options of factorizations with a term for trust."""

    embedding: Count = field(default=16, metadata=EMBEDDING)
    terms: Terms = field(default="biases", metadata=TERMS)
    weight: SocialWeight = field(
        default=10.0, metadata={"help": "weight of the term for trust", "tune": log(0.1, 100.0)}
    )


@dataclass(frozen=True, config=STRICT)
class ConsisRecOptions:
    """The defaults are those of the authors' code, but for the width and `terms`."""

    embedding: Count = field(default=16, metadata=EMBEDDING)
    terms: Literal["biases", "mean", "none"] = field(
        default="biases",
        metadata={"help": "what is added to a silo's mean: biases, or mean alone; none: no mean"},
    )
    sampled: Annotated[float, Field(gt=0, le=1)] = field(
        default=0.3,
        metadata={"help": "share of the neighbors that are drawn", "tune": log(0.1, 1.0)},
    )
    levels: Annotated[int, Field(ge=1, le=1000)] = field(
        default=5,
        metadata={"help": "kinds of ratings, from a client's lowest to its highest"},
    )


SHARED = {
    "help": "which biases are solved with all silos' ratings: none, those of items that several "
    "silos have, or of items and users (all)"
}
MIN_SILOS = {"help": "least number of silos with training ratings of a shared user or item"}


@dataclass(frozen=True, config=STRICT)
class RatingBiasesOptions:
    """See `silograph.nn.rating_factors`; the penalty is not tuned for any data."""

    damping: Annotated[float, Field(gt=0)] = field(
        default=5.0, metadata={"help": "penalty on squared biases", "tune": log(0.1, 100.0)}
    )
    terms: Terms = field(default="biases", metadata=TERMS)
    shared: Literal["none", "items", "all"] = field(default="none", metadata=SHARED)
    min_silos: Annotated[int, Field(ge=1)] = field(default=2, metadata=MIN_SILOS)


@dataclass(frozen=True, config=STRICT)
class RatingProfilesOptions:
    """See `silograph.nn.rating_profiles`; defaults were chosen by validation (shared.md)."""

    damping: Annotated[float, Field(gt=0)] = field(
        default=3.0, metadata={"help": "penalty on squared biases", "tune": log(0.1, 100.0)}
    )
    folds: Annotated[int, Field(ge=2, le=100)] = field(
        default=5,
        metadata={"help": "parts of a client's training ratings, each predicted by the others"},
    )
    shared: Literal["none", "items", "all"] = field(default="all", metadata=SHARED)
    min_silos: Annotated[int, Field(ge=1)] = field(default=2, metadata=MIN_SILOS)


@dataclass(frozen=True, config=STRICT)
class ModuleOptions:
    """Options of a user's torch.nn.Module, which has none here: its code decides."""


@plain_dataclass(frozen=True)
class ModelKind:
    """A model that users can name.

    Attributes:
        name: what they call it.
        title: one line for listings.
        reference: title, authors, venue, year.
        options: frozen dataclass of its own options.
    """

    name: str
    title: str
    reference: str
    options: type


MODEL_KINDS: dict[str, ModelKind] = {
    kind.name: kind
    for kind in (
        ModelKind(
            "gcn",
            "graph convolutions",
            "Kipf and Welling, Semi-supervised classification with graph convolutional networks, "
            "ICLR 2017",
            LayerOptions,
        ),
        ModelKind(
            "sage",
            "means over neighbors, and an own weight for the node itself",
            "Hamilton et al., Inductive representation learning on large graphs, NeurIPS 2017",
            LayerOptions,
        ),
        ModelKind(
            "graphconv",
            "sums over neighbors, and an own weight for the node itself",
            "Morris et al., Weisfeiler and Leman go neural, AAAI 2019",
            LayerOptions,
        ),
        ModelKind(
            "gin",
            "sums over neighbors, then two layers",
            "Xu et al., How powerful are graph neural networks?, ICLR 2019",
            LayerOptions,
        ),
        ModelKind(
            "gat",
            "attention over neighbors",
            "Velickovic et al., Graph attention networks, ICLR 2018",
            GATOptions,
        ),
        ModelKind(
            "appnp",
            "layers without neighbors, whose predictions are propagated",
            "Gasteiger et al., Predict then propagate, ICLR 2019",
            APPNPOptions,
        ),
        ModelKind(
            "rating_gcn",
            "ratings: graph convolutions over a client's own embeddings and biases",
            "Xu et al., FedACS: An adaptive client selection framework for communication-efficient "
            "federated graph learning, IEEE TMC 2025",
            RatingGCNOptions,
        ),
        ModelKind(
            "rating_gat",
            "ratings: attention over a client's own embeddings and biases",
            "Xu et al., FedACS: An adaptive client selection framework for communication-efficient "
            "federated graph learning, IEEE TMC 2025",
            RatingGATOptions,
        ),
        ModelKind(
            "rating_mf",
            "ratings: biases and a product of factors of user and item",
            "Koren et al., Matrix factorization techniques for recommender systems, 2009",
            RatingFactorsOptions,
        ),
        ModelKind(
            "sorec",
            "ratings: the same, whose factors of users predict trust, too",
            "Ma et al., SoRec: Social recommendation using probabilistic matrix factorization, "
            "CIKM 2008",
            SocialFactorsOptions,
        ),
        ModelKind(
            "soreg",
            "ratings: the same, with factors that are near those of trusted users",
            "Ma et al., Recommender systems with social regularization, WSDM 2011",
            SocialFactorsOptions,
        ),
        ModelKind(
            "consisrec",
            "ratings: embeddings of a pair from drawn neighbors that are consistent with it",
            "Yang et al., ConsisRec: Enhancing GNN for social recommendation via consistent "
            "neighbor aggregation, SIGIR 2021",
            ConsisRecOptions,
        ),
        ModelKind(
            "rating_biases",
            "ratings: a silo's mean and biases of users and items, solved, what others must beat",
            "Koren et al., Matrix factorization techniques for recommender systems, 2009",
            RatingBiasesOptions,
        ),
        ModelKind(
            "rating_profiles",
            "ratings: biases of each silo, and a correction by profiles of users and items",
            "ours, on biases as in Koren et al., Matrix factorization techniques for recommender "
            "systems, 2009",
            RatingProfilesOptions,
        ),
        ModelKind("mlp", "layers without neighbors", "what a graph must beat", MLPOptions),
    )
}
FACTOR_MODELS = ("rating_mf", "sorec", "soreg")
RATING_MODELS = (
    *("rating_profiles", "rating_gcn", "rating_gat", "rating_biases"),
    *FACTOR_MODELS,
    "consisrec",
)
MODULE = ModelKind("module", "a torch.nn.Module of the user's", "", ModuleOptions)
