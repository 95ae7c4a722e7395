"""Recipes: cells, and the page that is written of their outcomes."""
