"""Methods side by side, with paired tests."""
