"""What the views mean: which neighbors a node hears when the server's model is judged."""

from collections.abc import Iterable

OWN = "through its own client's graph"
FETCHED = "through its own client's graph and the neighbors that it has fetched"
MENDED = "through its own client's graph and the neighbors that it has generated"
HALO = "with its neighbors in all silos from the second layer on"
SILOS = "with its neighbors in all silos"
UNCUT = "on the uncut graph, where it was trained"
MEANS = {
    "uncut": "server's model on the uncut graph (simulation only)",
    "personalized": "each client's own model on its own nodes",
}
ONE_MODEL = "the same: there is one model, the server's"


def means_of(ways: Iterable[str]) -> dict[str, str]:
    """Return what the views mean for runs that see nodes in these ways, those above."""
    seen = list(dict.fromkeys(ways))
    depends = ", as the run has it" if len(seen) > 1 else ""
    own = ONE_MODEL if {SILOS, UNCUT}.issuperset(seen) else MEANS["personalized"]
    server = f"server's model, each node {' or '.join(seen)}{depends}"
    return {"server": server, **MEANS, "personalized": own}
