"""Graphs from what users have: arrays, tables, archives, and the loaders of other packages."""
