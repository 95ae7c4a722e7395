"""From a config to a result: set-up, the round loop, progress, result folders."""
