"""What a message carries. Every call between server and clients declares one of these."""

from enum import StrEnum

# Begins the names of scores of the weights that a message has brought: they are evaluation,
# whatever the kind of the call.
RECEIVED = "received/"


class Kind(StrEnum):
    """The declared content of a message; bytes are counted and privacy is checked by it."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    PARTIAL_SUMS = "partial_sums"
    COTANGENTS = "cotangents"
    EMBEDDINGS = "embeddings"
    FEATURES = "features"
    GENERATED = "generated"
    STATISTICS = "statistics"
    HALO_KEYS = "halo_keys"
    EVALUATION = "evaluation"
    SHARES = "shares"
    CONTROL = "control"
    OPTIMIZER = "optimizer"  # carried by no message: a part of the work at clients
    KEYS = "keys"  # of secure sums, as SHARES and MASKS: what unmasks them
    MASKS = "masks"
