"""Simulations on several cores or machines: workers that hold clients, and their engine."""
