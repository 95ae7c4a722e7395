"""Secure aggregation: sums over silos of which the server learns nothing but the sum."""
