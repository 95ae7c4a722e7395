"""Differential privacy: clipped updates on a grid, integer noise, and what releases cost."""
