"""From public node keys to the 64-bit counters that every draw for a node starts from."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from silograph.core.key import Key, hash_texts, mix_words, unmix_words


def node_words(node_id: np.ndarray) -> Tensor:
    """Return a 64-bit word for every public node key, (n,) int64.

    Integers are mixed, unsigned ones by their 64 bits, strings hashed (BLAKE2b). Neither depends on
    the position of the node.
    """
    if np.issubdtype(node_id.dtype, np.integer):
        return mix_words(torch.from_numpy(node_id.astype(np.int64)))
    digests = b"".join(
        hashlib.blake2b(str(name).encode(), digest_size=8).digest() for name in node_id
    )
    return torch.from_numpy(np.frombuffer(digests, dtype="<i8").astype(np.int64))


def row_keys(client_id: str, node_id: np.ndarray) -> Tensor:
    """Return the counters of a client's rows, (n,) int64: they name client and node together."""
    return client_words(hash_texts([client_id]), node_words(node_id))


def client_words(clients: Tensor, words: Tensor) -> Tensor:
    """Return the counters of rows from their clients' hashes (n,) and their keys' words (n,)."""
    return mix_words(words ^ clients)


def words_of_rows(client_id: str, keys: Tensor) -> Tensor:
    """Return the words (n,) of the public keys of a client's rows: `client_words` undone."""
    return unmix_words(keys) ^ hash_texts([client_id]).to(keys.device)


def key_order(node_id: np.ndarray, key: Key) -> Tensor:
    """Return the nodes in the order of one draw each from their public keys, (n,) int64."""
    return drawn_order(node_words(node_id), key)


def drawn_order(words: Tensor, key: Key) -> Tensor:
    """Return the order of one draw for each of the words (n,) int64, (n,) int64."""
    return torch.argsort(key.words(words, 1)[:, 0], stable=True)
