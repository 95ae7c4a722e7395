"""Methods and settings are compared on the same partitions, splits and initial weights.

Shows: `sg.compare` with named arms, several seeds and a paired test; the table for a paper.
"""

import silograph as sg

if __name__ == "__main__":
    graph = sg.load("digits")
    print(graph)
    table = sg.compare(
        graph,
        arms={
            "local": {"method": "local"},
            "FedOpt": {"method": "fedopt"},
            "FedOpt, SAGE": {"method": "fedopt", "model": "sage"},
        },
        baseline="FedOpt",
        seeds=3,
        clients=4,
        partition="metis",
        rounds=10,
        hidden=16,
        processes=0,
    )
    print(table)
    print(table.to_latex())
