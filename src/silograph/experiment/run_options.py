"""Keywords of `run`, `compare` and `tune`, for editors and type checkers.

Made from `RunConfig` by `make options`: change the fields there.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np
from torch import Tensor

from silograph.core.setting_values import Scalar
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import Partition
from silograph.methods.base import Method
from silograph.nn.own_module import Make


class StudyOptions(TypedDict, total=False):
    """Fields that all runs of a study share."""

    dataset: str
    """name of a dataset, or a path to its file"""
    data_dir: str | None
    """folder in which datasets are looked for first"""
    columns: str | None
    """names of columns in tables, such as id=key,label=kind (of id, label, silo, source, target,
    weight, features; of ratings user, item, rating, time, split, category, truster, trustee);
    several: label=red+blue, features=age+income"""
    na_values: str | Sequence[str | float] | None
    """words or numbers that count as missing in a graph's tables or .npz file besides the usual
    ones, such as -999,unknown (a word with a comma: ["a, b"])"""
    scale: float
    """factor of nodes and edges, of a generated dataset only"""
    rating_scale: str | None
    """least and largest rating of a folder of tables of ratings, such as 0.5,5 (default: 1,5)"""
    largest_component: bool
    """keep only the largest connected component"""
    features: Literal["given", "degree", "constant", "onehot-degree"]
    """features of nodes: those of the data, or made of what each silo knows"""
    normalize: Literal["none", "row", "standard", "standard_client"]
    """scaling of features (row: divide a node's by their sum; standard: mean 0 and deviation 1
    over the training nodes of all clients; standard_client: over those of each client)"""
    feature_drift: bool
    """before training, clients send counts of each feature in bins, and feature_drift.csv says
    how far each client differs from the others"""
    edge_weights: Literal["log", "scale", "use", "ignore"] | None
    """what becomes of weights of edges (gcn, graphconv, appnp): log2(1 + weight), weights scaled
    to mean 1 over all clients, weights used as they are, or every edge counts 1 (default: log)"""
    repeated_edges: Literal["mean", "sum", "count", "last", "first"] | None
    """what an edge weighs that a graph's file lists several times, as in both directions: the
    mean of its weights, their sum, how often it is listed, or the last or first weight (default:
    mean)"""
    directed: Literal["none", "along", "against", "both"]
    """which way messages pass an edge: none (both ways, as if edges had no direction), along it
    (from source to target), against it, or both, with weights of their own"""
    split: str
    """train/val/test shares in each client (time:COLUMN:SHARES: by a column of times, the latest
    test, time:SHARES by that of ratings; by-client:SHARES: each client splits its own copies);
    fold=I/K of cross validation; public; full (public, all others train)"""
    partition: (
        str
        | os.PathLike[str]
        | Partition
        | Sequence[int]
        | np.ndarray
        | Tensor
        | Callable[[Graph], Any]
    )
    """how to cut: metis, louvain, random, dirichlet, class_biased, silo, category, with overlap
    metis_overlapping or shares, or FILE.csv with columns node and client"""
    clients: int | None
    """number of clients (default: 10; silo: as many as silos)"""
    alpha: float | None
    """dirichlet: concentration, smaller is more skewed (default: 0.5)"""
    favored_classes: int | None
    """class_biased: classes favored at each client, fewer than there are (default: 2, or 1 of
    two classes)"""
    favor: float | None
    """class_biased: how many times as likely they are (default: 10.0)"""
    clients_per_part: int | None
    """metis_overlapping: clients drawn from each part of METIS (default: 5)"""
    part_share: float | None
    """metis_overlapping: share of a part's nodes that each of them gets (default: 0.5)"""
    share_mean: float | None
    """shares: mean share of all nodes at a client (default: 0.8)"""
    share_variance: float | None
    """shares: variance of that share (default: 0.1)"""
    share_classes: int | None
    """shares: classes drawn for each client, whose nodes it draws from (default: all)"""
    drop_edges: float
    """share of a client's internal edges dropped, in any cut"""
    participation: float | None
    """uniform: share of clients that train in a round (default: 1.0)"""
    selector: str | None
    """which clients train in a round: all, uniform (a share of them, see participation),
    round_robin, power_of_choice, oort, harmony or ucb; or FILE.py:NAME (default: ucb for fedacs,
    else uniform)"""
    model: Make | str
    """layers: gcn, sage, graphconv, gin, gat, appnp or mlp; for ratings rating_profiles,
    rating_gcn, rating_gat, rating_biases, rating_mf, sorec, soreg or consisrec; or a
    torch.nn.Module of your own: FILE.py:NAME or package.module:NAME (default: gcn; for ratings
    rating_profiles, for fedacs rating_gcn)"""
    layers: int | None
    """layers with weights (default: 2, or as hidden says)"""
    hidden: int | str | None
    """width of the hidden layers, or one for each: 256,128 (default: 128; for fedacs on ratings,
    32 with 5 layers)"""
    head: str | None
    """gcn, sage, graphconv, gin, gat: the last layer: conv as the others, or linear, a
    classifier on top of them (default: conv)"""
    dropout: float
    """share of hidden activations dropped"""
    input_dropout: float | None
    """share of the features dropped in training (default: 0.0)"""
    attention_dropout: float | None
    """gat: share of the attention to neighbors dropped in training (default: 0.0)"""
    residual: bool | None
    """add a hidden layer's input to its output (from 3 layers on) (default: false)"""
    heads: int | None
    """gat: attention heads (default: 8)"""
    hops: int | None
    """appnp: propagation steps (default: 10)"""
    teleport: float | None
    """appnp: share of the prediction kept in a step (default: 0.1)"""
    aggregator: str
    """what the server makes of the clients' weights: mean, median or trimmed_mean; or
    FILE.py:NAME (methods that average weights)"""
    server_optimizer: str | None
    """the server's step towards the clients' mean: none (it takes the mean), momentum or adam;
    or FILE.py:NAME (methods that average weights; default: adam for fedopt, fedgraph, fedais and
    its presets, else none)"""
    rounds: int
    """number of rounds"""
    local_epochs: int | None
    """passes of a client over its nodes in a round (default: by method, 1 for most)"""
    collect: float
    """share of neighbors in other silos whose features each client fetches before training
    (features leave their silo)"""
    min_nodes_per_row: int
    """least number of own nodes behind each row that a silo sends; others are left out (methods
    that exchange sums)"""
    min_silos_per_row: int
    """least number of silos that contribute to a sum of rows; smaller sums are left out by the
    server, or by the silos with secure_aggregation (methods that exchange sums)"""
    batch_size: int | None
    """training nodes in a local step (default: all of a client)"""
    fanout: str | None
    """fanout: neighbors drawn of a node, hop by hop: 10,5; 0 is all (default: 10)"""
    neighbors: str | None
    """what draws neighbors in local steps: full, fanout, bernoulli, drop_edge, drop_node,
    fastgcn, ladies or fedgrains; or FILE.py:NAME (default: fanout if that is given, else full)"""
    optimizer: Literal["adam", "sgd"] | None
    """the clients' optimizer (default: sgd for fedopt and scaffold, else adam)"""
    lr: float | None
    """the clients' learning rate (default: by method, else sgd 0.1 and adam 0.01)"""
    lr_schedule: str
    """the clients' learning rate over rounds: constant, cosine (to 0 at the end), or
    step:ROUNDS:FACTOR (times FACTOR after every ROUNDS rounds)"""
    warmup_rounds: int
    """first rounds, in which the rate rises in equal steps"""
    weight_decay: float | None
    """L2 penalty added to the gradient (default: by method, else 5e-4)"""
    decay_layers: Literal["all", "first"]
    """layers whose weights and biases have the L2 penalty"""
    momentum: float
    """momentum of the clients' sgd"""
    keep_optimizer: bool | None
    """keep optimizer state between rounds (default: by method)"""
    class_weight: str | os.PathLike[str] | Mapping[str, float] | None
    """weight of each class in the loss of training nodes: balanced (rare classes count more, by
    the counts of all clients), none, or a TOML or CSV file of class = weight (default: none)"""
    weights_as: Literal["exact", "float16", "int8", "int4"]
    """how weights travel: exact, or matrices rounded to float16, to bytes (int8) or to half
    bytes (int4) with a scale for each row; clients send changes, with what was rounded off
    before"""
    weight_rows: Literal["all", "used"]
    """rows of the first weights that travel: all, or those of features that occur at the client,
    which shows the server which these are"""
    secure_aggregation: bool
    """the server learns sums over clients only, of weights, gradients and counts, which clients
    mask (methods that need no reply of a single client)"""
    dp_epsilon: float | None
    """differential privacy: epsilon that the whole run may cost; needs dp_delta (default: no
    differential privacy)"""
    dp_delta: float | None
    """delta at which dp_epsilon holds; well below 1 / number of units"""
    dp_unit: Literal["silo", "node"] | None
    """what differential privacy hides: whether a whole silo takes part (silo), or a single node
    of one (node); node works with the models gcn and sage (default: silo)"""
    dp_clip: float | None
    """largest norm of a silo's update, with dp_unit=node of a training node's gradient; larger
    ones are scaled to it (default: 1)"""
    dp_clip_quantile: float | None
    """start the clip at dp_clip and move it towards this quantile of the norms of updates, such
    as 0.5 for the median; for dp_unit=silo (default: the clip is fixed)"""
    dp_degree: int | None
    """with dp_unit=node: most edges of a node that are sampled in a round; more edges need more
    noise (default: 3)"""
    positive: str | None
    """of two classes the one that average precision, precision and recall, calibration and
    decisions are of (default: the second)"""
    threshold: str | None
    """of two classes: choose on validation nodes from which probability on a node is taken for
    the positive one, by f1, recall@fpr=.01 or cost=FP:FN (costs of a false positive and a false
    negative); it is saved with the model"""
    relevant: float | None
    """of ratings: rank each silo's items for its users, and score by recall@10 and ndcg@10 how
    many that a user rates so high or higher come first (default: none are ranked; 4 with one of
    these as metric)"""
    patience: int | None
    """stop after this many rounds without better validation"""
    target: str | None
    """stop at a validation score: METRIC=VALUE, or a value of the run's metric"""
    max_bytes: str | int | None
    """stop when this much has been exchanged in all, e.g. 10MB"""
    max_seconds: float | None
    """stop after this many seconds of training"""
    speeds: str | None
    """speeds of clients on a virtual clock: equal, lognormal, or numbers of 10^9 operations a
    second that clients have in turn, such as 1,2,4 (default with links: equal)"""
    links: str | None
    """links of clients on a virtual clock, in turn: MB/s:SECONDS of latency for each call, such
    as 10:0.05,0.5:0.2 (default with speeds: 10:0.05)"""
    max_virtual_seconds: float | None
    """stop after this many seconds of the virtual clock"""
    eval_every: int
    """rounds between evaluations"""
    evaluate_clients: Literal["all", "participants"] | None
    """who scores the server's model of a round: all clients, or those that train from it in the
    next round; all score the last and the best one (default: all in a simulation, participants
    with a server of silos if the method can)"""
    evaluation_min_count: int | None
    """least number of nodes behind each count that a client sends when it evaluates; smaller
    ones are merged or left out (default: 0, and 5 for a server of real silos)"""
    local_bias: bool
    """train a centralized model from the same weights, too, and tell how far logits are from its
    (simulation only)"""
    partition_seed: int | None
    """seed of the cut (default: seed)"""
    split_seed: int | None
    """seed of train/val/test (default: seed)"""
    init_seed: int | None
    """seed of the initial weights (default: seed)"""
    dtype: Literal["float32", "float64"]
    """precision of training"""
    device: str
    """torch device"""
    threads: int
    """torch threads; part of what makes runs equal"""
    kernels: Literal["auto", "compiled", "torch"]
    """compiled needs a CPU and numba; auto takes it if it can"""
    block_size: int | None
    """most clients in one computation (default: by memory)"""
    engine: Literal["local", "ray"]
    """where the clients of a simulation compute: local (this machine), or ray (a Ray cluster);
    results are the same"""
    workers: int | str | None
    """processes that share the clients of a simulation, or auto: one for each core (default:
    this process alone; ray: auto)"""
    address: str | None
    """where a Ray cluster runs, HOST:PORT, or auto: on this machine (default: one is started)"""
    keep_every: int | None
    """rounds between copies of the workers' states; a lost worker does again what came after the
    last one; 0 is never (default: 10)"""
    strict: bool
    """encode and decode every message, as a network would"""
    checkpoint_every: int | None
    """rounds between checkpoints in the result folder; 0 is never (default: as often as takes
    about a tenth of the run's time)"""
    tracker: str | None
    """who is told of every round: tensorboard, tensorboard=DIR, mlflow or mlflow=URI"""


class TuneOptions(StudyOptions, total=False):
    """Keywords of `tune`."""

    method: Method | str
    """what trains: fedopt, fedavg, fedacs, fedmf, fedgnn, fesog, fedprox, fedper, gcfl,
    gcflplus, fedpub, fedsageplus, fedsage_local, scaffold, llcg, fedais, fedall, fedrandom,
    fedlocal, fedpns, fedais1, fedais2, stale, fedgraph, label_guided, bns, cagnet, local,
    centralized or graphsaint"""
    options: Mapping[str, Scalar]
    """options of the method and of other chosen parts, as NAME or PART.NAME; parts: method,
    partition, model, neighbors, selector, aggregator, server_optimizer (see silograph parts)"""
    metric: str | None
    """the score that picks the best round, stops by patience, is tuned, compared and shown
    first, such as auc, average_precision, precision@100 or recall@fpr=.01 (default: accuracy;
    f1_micro for label sets, rmse for numbers)"""


class RunOptions(StudyOptions, total=False):
    """Keywords of `run`."""

    seed: int
    """seed of training and of the others"""
    out: str | None
    """result folder (default: none is written)"""
    options: Mapping[str, Scalar]
    """options of the method and of other chosen parts, as NAME or PART.NAME; parts: method,
    partition, model, neighbors, selector, aggregator, server_optimizer (see silograph parts)"""
    metric: str | None
    """the score that picks the best round, stops by patience, is tuned, compared and shown
    first, such as auc, average_precision, precision@100 or recall@fpr=.01 (default: accuracy;
    f1_micro for label sets, rmse for numbers)"""
