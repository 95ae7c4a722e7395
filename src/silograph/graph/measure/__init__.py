"""Statistics of graphs and cuts."""
