"""From a config to all that a run is made of: data, clients, model, kernels."""
