"""Silos that have data of their own: their folders, read and written."""
