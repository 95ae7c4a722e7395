"""Tables 4 to 8 of FedGrAINS as they are printed, for the five graphs that are at hand.

E. Ceyani et al.: "FedGrAINS: Personalized subgraph federated learning with adaptive neighbor
sampling". Numbers of clients: 5, 10, 20 (disjoint) and 10, 30, 50 (overlapping).
"""

DATASETS = {
    "cora": "Cora",
    "citeseer": "CiteSeer",
    "pubmed": "PubMed",
    "amazon_computers": "Computers",
    "amazon_photo": "Photo",
}
CLIENTS = {"disjoint": (5, 10, 20), "overlapping": (10, 30, 50)}
Printed = dict[str, dict[str, tuple[float, ...]]]

# Table 4, column "Ori": nodes, edges (both directions), clustering coefficient.
UNCUT = {
    "cora": (2485, 10138, 0.238),
    "citeseer": (2120, 7358, 0.170),
    "pubmed": (19717, 88648, 0.060),
    "amazon_computers": (13381, 491556, 0.351),
    "amazon_photo": (7487, 238086, 0.410),
}
# Table 4: nodes a client.
NODES: Printed = {
    "disjoint": {
        "cora": (497, 249, 124),
        "citeseer": (424, 212, 106),
        "pubmed": (3943, 1972, 986),
        "amazon_computers": (2676, 1338, 669),
        "amazon_photo": (1497, 749, 374),
    },
    "overlapping": {
        "cora": (621, 207, 124),
        "citeseer": (530, 177, 106),
        "pubmed": (4929, 1643, 986),
        "amazon_computers": (3345, 1115, 669),
        "amazon_photo": (1872, 624, 374),
    },
}
# Table 4: edges a client, both directions.
EDGES: Printed = {
    "disjoint": {
        "cora": (1866, 891, 422),
        "citeseer": (1410, 675, 326),
        "pubmed": (16374, 7671, 3607),
        "amazon_computers": (84480, 36136, 15632),
        "amazon_photo": (43138, 19322, 8547),
    },
    "overlapping": {
        "cora": (1249, 379, 215),
        "citeseer": (889, 293, 170),
        "pubmed": (10675, 3374, 1903),
        "amazon_computers": (59236, 16684, 8969),
        "amazon_photo": (29223, 8735, 4840),
    },
}
# Table 4: clustering coefficient.
CLUSTERING: Printed = {
    "disjoint": {
        "cora": (0.250, 0.259, 0.263),
        "citeseer": (0.175, 0.178, 0.180),
        "pubmed": (0.063, 0.066, 0.067),
        "amazon_computers": (0.385, 0.398, 0.418),
        "amazon_photo": (0.437, 0.457, 0.477),
    },
    "overlapping": {
        "cora": (0.133, 0.129, 0.125),
        "citeseer": (0.088, 0.087, 0.096),
        "pubmed": (0.035, 0.034, 0.035),
        "amazon_computers": (0.337, 0.348, 0.359),
        "amazon_photo": (0.380, 0.391, 0.410),
    },
}
# Table 4: heterogeneity, "median Jenson-Shannon divergence of label distributions".
HETEROGENEITY: Printed = {
    "disjoint": {
        "cora": (0.590, 0.606, 0.665),
        "citeseer": (0.517, 0.541, 0.568),
        "pubmed": (0.362, 0.392, 0.424),
        "amazon_computers": (0.604, 0.612, 0.647),
        "amazon_photo": (0.684, 0.681, 0.751),
    },
    "overlapping": {
        "cora": (0.297, 0.567, 0.613),
        "citeseer": (0.278, 0.494, 0.547),
        "pubmed": (0.210, 0.383, 0.394),
        "amazon_computers": (0.327, 0.577, 0.614),
        "amazon_photo": (0.306, 0.696, 0.684),
    },
}
# Tables 5 (disjoint) and 6 (overlapping; its caption says disjoint): missing links.
MISSING: Printed = {
    "disjoint": {
        "cora": (403, 615, 853),
        "citeseer": (105, 304, 424),
        "pubmed": (3388, 5969, 8254),
        "amazon_computers": (34578, 65098, 89456),
        "amazon_photo": (28928, 22434, 33572),
    },
    "overlapping": {
        "cora": (1391, 1567, 1733),
        "citeseer": (922, 1043, 1160),
        "pubmed": (11890, 13630, 15060),
        "amazon_computers": (66562, 95530, 107740),
        "amazon_photo": (11197, 37207, 45219),
    },
}
# Tables 7 (disjoint) and 8 (overlapping; its caption says disjoint): Hellinger distance.
HELLINGER: Printed = {
    "disjoint": {
        "cora": (0.4292, 0.6508, 0.7198),
        "citeseer": (0.4864, 0.6507, 0.7076),
        "pubmed": (0.1333, 0.1515, 0.2279),
        "amazon_computers": (0.265, 0.2526, 0.2855),
        "amazon_photo": (0.234, 0.2438, 0.3079),
    },
    "overlapping": {
        "cora": (0.4265, 0.7237, 0.7492),
        "citeseer": (0.6739, 0.7314, 0.75),
        "pubmed": (0.1428, 0.3875, 0.4352),
        "amazon_computers": (0.2623, 0.258, 0.2682),
        "amazon_photo": (0.3009, 0.2356, 0.2942),
    },
}


def missing_by_table_4(dataset: str, number: int) -> float:
    """Return the missing links that table 4 implies for a disjoint cut: whole less internal."""
    internal = CLIENTS["disjoint"][number] * EDGES["disjoint"][dataset][number]
    return (UNCUT[dataset][1] - internal) / 2
