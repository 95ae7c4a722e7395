"""How silos come together before training, by keyed hashes of the edges between them."""
