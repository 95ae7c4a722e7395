"""How many subgraphs one node can change, where every node has few sampled edges.

Daigavane, Madan, Sinha, Thakurta, Aggarwal and Jain, "Node-level differentially private graph
neural networks", 2021 (arXiv 2111.15521): edges are sampled until no node has more than K, the
gradient of each training node is that of its subgraph of r hops, and a node is in few subgraphs.

What we changed. Their algorithm 1 samples the edges of a node by its degree. If a node is added,
its neighbors sample other edges as well, and subgraphs change in which the node is not. We count
those, too. An edge is sampled if it is among the K first of both of its ends, in an order that is
drawn for pairs of nodes (`silograph.nn.bounded_subgraphs`). The sampled graph has no directions.

Neighbors are silos with and without one node (*add or remove*). Let v have at most K edges. Then
all of them are among its first K, and

- at most B = 1 + K (1 + (K - 1) + ... + (K - 1)^(r - 1)) nodes are within r hops of v: the training
  nodes among them have v in their subgraphs;
- without v, each sampled neighbor u of v has room for one more edge, to some w, and no other edge
  changes. Who is within r - 1 hops of u had v in its subgraph. Of each w at most
  1 + (K - 1) + ... + (K - 1)^(r - 1) nodes are within r - 1 hops, without the new edge. There are K
  such w, so B - 1 further subgraphs change.

So at most 2 B - 1 subgraphs change. Each changes the sum of clipped gradients by at most 2 C: from
one gradient of norm C to another one. (B is at most (K^(r + 1) - 1) / (K - 1), the bound of the
paper, which has edges with directions.)

If v has more than K edges, its features, label and role are covered in the same way: replacing
them changes no edge, so at most B subgraphs. Which edges it has is not covered.
"""


def most_nodes_within(degree: int, hops: int) -> int:
    """Return B: how many nodes are within some hops of a node if none has more edges than K.

    Args:
        degree: K.
        hops: r.
    """
    in_branch: int = sum((degree - 1) ** hop for hop in range(hops))
    return 1 + degree * in_branch


def most_changed_subgraphs(degree: int, hops: int) -> int:
    """Return how many subgraphs change, at most, if a node is added or removed.

    Args:
        degree: K, edges that are sampled of a node at most.
        hops: r, hops from the training node of a subgraph.
    """
    return 2 * most_nodes_within(degree, hops) - 1
