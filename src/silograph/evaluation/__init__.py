"""Counts that clients may return, and the scores made of them."""
