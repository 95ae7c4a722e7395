"""`per_client`: an op written for one client, used on any block."""

import functools
from typing import Any

import torch

from silograph.core.key import Key
from silograph.core.payload import Payload, State, join, state_of, take_all
from silograph.core.work import work_of
from silograph.federation.base import Op
from silograph.graph.block.block import ClientBlock


def per_client(op: Op) -> Op:
    """Return the op that splits a block into blocks of one, maps `op`, and joins the results.

    It means the same as a batched op; only speed differs.
    """

    @functools.wraps(op)
    def lifted(
        cfg: Any,
        block: ClientBlock,
        state: State,
        inbox: Payload,
        key: Key,
    ) -> tuple[State, Payload]:
        if block.num_clients == 1:
            return op(cfg, block, state, inbox, key)
        states: list[Payload] = []
        replies: list[Payload] = []
        for position in torch.arange(block.num_clients, device=block.off.device).split(1):
            own = state_of(take_all(state, position))
            with work_of(position):
                new, reply = op(cfg, block.take(position), own, take_all(inbox, position), key)
            states.append(new)
            replies.append(reply)
        return state_of(join(states)), join(replies)

    return lifted
