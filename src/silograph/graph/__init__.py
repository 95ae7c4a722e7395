"""Graphs, where they come from, how they are cut, and the blocks of clients made of them."""
