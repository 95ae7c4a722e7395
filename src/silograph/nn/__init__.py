"""Layers over a block of clients, models made of them, losses and optimizers."""
