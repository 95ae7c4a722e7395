"""Keys, payloads, kinds, errors and config: what every other part builds on."""
