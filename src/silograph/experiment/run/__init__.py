"""One run: set-up, the loop of rounds, snapshots, result folders, trackers."""
