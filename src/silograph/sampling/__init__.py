"""Which nodes and neighbors take part in a step."""
