"""Who holds which nodes and edges: cuts of a graph into clients, and what nodes are for."""
