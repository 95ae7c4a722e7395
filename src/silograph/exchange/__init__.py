"""Rows across clients: sums, rows fetched and sent, passes through a model of all silos."""
