"""Blocks of clients, and the halo of nodes that other clients own."""
