"""Programs that score models, in views."""
