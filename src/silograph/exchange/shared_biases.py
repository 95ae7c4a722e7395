"""Biases of users and items that several clients have, from all their ratings together.

    r_ui = mean + b_u + b_i,   min over b of sum (r_ui - mean - b_u - b_i)^2 + damping * sum b^2

This is the problem of `rating_biases` (Koren, Bell and Volinsky, "Matrix factorization techniques
for recommender systems", Computer 2009), solved for the ratings of all clients without any rating
leaving its client. Users and items are found at several clients by tags:

1. Each client sends a tag of each of its users and items with its number of training ratings, and
   the number and sum of all its training ratings. Tags of items are words of their public keys;
   those of users are keyed by a secret that silos share, so that the server cannot test a guess
   (`ClientBlock.user_tag`). Without such a secret they match nowhere.
2. The server finds out which tags are shared: at least `min_silos` clients have training ratings
   of them. It tells each client which of its own these are, and the mean of all ratings.
3. In turns, exact in the biases of users and then of items (Gauss-Seidel), clients send for each
   shared user or item the sum of its residuals, and the server divides by number and damping.
   Biases of all others are solved at their client, in the same turns.
   A client whose items are all shared takes the mean of all ratings, one without shared items its
   own, others a mean of the two in proportion to their ratings of shared items: biases of items
   that nobody else has are relative to their own shop's level.
4. Each client keeps, for each shared user and item, sum and number of the other clients' residuals.

From then on a client solves its biases with these sums as further ratings, whatever part of its own
ratings it leaves out. A client that shares nothing keeps its own mean and biases.

With `min_silos` of 1 and every user and item shared, biases are those of all ratings together. No
row of fewer silos than `min_silos` leaves the server; the server itself sees each client's sums.

This federated solution is ours; it is the alternating least squares of the centralized problem.

C: clients. k: tags of a client. s: shared ones. n: rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, Stacked, State, offsets, owners
from silograph.core.work import report_rows
from silograph.federation.base import Federation
from silograph.federation.field_specs import COUNT, NODES, TRAIN, FieldSpec, FieldSpecs
from silograph.federation.messages import Empty, from_payload, specs_of, to_payload
from silograph.federation.ops import (
    CallContext,
    ClientOp,
    Clients,
    Request,
    anyone,
    op,
    repeat,
    steps_of,
)
from silograph.federation.program import Steps
from silograph.graph.block.block import ClientBlock, SharedSums, kinds, pairs_of
from silograph.graph.graph import words_of_rows
from silograph.nn.forward import AnyModel
from silograph.nn.rating_factors import PER_TURN, RatingBiases
from silograph.nn.rating_profiles import RatingProfiles
from silograph.nn.rating_steps import require_one_client

SIDES = ("user", "item")
TURNS = 60  # of users and items each, at most
TOLERANCE = 1e-3  # change of a client's sum in a turn, below which turns end: far below the noise
LARGEST = 1e9  # rating, and residual of one
SHARED = "shared/"  # begins the names of state fields
SHARED_MEAN, NUMBER = f"{SHARED}mean", f"{SHARED}number"


@dataclass(frozen=True)
class Sharing:
    """What is shared in a run; messages depend on nothing else.

    Attributes:
        damping: penalty on squared biases.
        min_silos: least number of clients with training ratings of a shared user or item.
        sides: of SIDES, what is matched.
    """

    damping: float
    min_silos: int
    sides: tuple[str, ...]


def sharing_of(model: AnyModel) -> Sharing | None:
    """Return what a model shares before training, None for models without shared biases."""
    if not isinstance(model, RatingBiases | RatingProfiles) or model.shared == "none":
        return None
    sides = SIDES if model.shared == "all" else ("item",)
    return Sharing(model.damping, model.min_silos, sides)


# --- Messages and state --------------------------------------------------------------------------


def by_side(
    field: str,
    dtype: torch.dtype = torch.float64,
    *,
    rows: str = "",
    low: float | None = None,
    high: float | None = None,
    ascending: bool = False,
    optional: bool = False,
) -> Callable[[Sharing], FieldSpecs]:
    """Return specs of a field for users and for items; `{side}` in `rows` stands for which."""

    def specs(sharing: Sharing) -> FieldSpecs:
        del sharing
        return {
            f"{field}/{side}": FieldSpec(
                Ragged,
                (),
                dtype,
                rows=rows.format(side=side) or NODES,
                fewer=not rows,
                low=low,
                high=high,
                ascending=ascending,
                optional=optional,
            )
            for side in SIDES
        }

    return specs


OWN_PLACES, STATE_PLACES = "own/shared/place/{side}", "state/shared/place/{side}"


@dataclass(frozen=True)
class OwnTags:
    """The users and items of a client, and its training ratings.

    Attributes:
        tag: (k,) int64 of each user and item, ascending, so that the order says nothing.
        rated: (k,) int32 training ratings of each.
        ratings: (C,) int64 training ratings.
        total: (C,) float64 their sum.
    """

    tag: Annotated[Mapping[str, Ragged], by_side("tag", torch.int64, ascending=True)]
    rated: Annotated[
        Mapping[str, Ragged], by_side("rated", torch.int32, rows="own/tag/{side}", low=0)
    ]
    ratings: Annotated[Stacked, replace(COUNT, among=TRAIN)]
    total: Annotated[Stacked, FieldSpec(Stacked, (), torch.float64)]

    def find_problem(self, request: Empty, cfg: Sharing) -> str | None:
        """Return which numbers contradict each other, or None.

        Every training rating has a user and an item, but a user or an item may be left out.
        """
        del request, cfg
        most = self.ratings.t.double()
        if not bool((self.total.t.abs() <= LARGEST * most).all()):  # so not if it is NaN
            return f"a sum of at most {LARGEST:g} a rating, got more"
        for side in SIDES:
            if int(self.rated[side].t.long().sum()) > int(most.sum()):
                return f"at most as many ratings of each {side} as in all, got more"
        return None


@dataclass(frozen=True)
class SharedPlaces:
    """Which of its tags a client shares.

    Attributes:
        place: (s,) int32 places among its tags, ascending.
        mean: () float64 of all clients' training ratings.
    """

    place: Annotated[Mapping[str, Ragged], by_side("place", torch.int32, low=0, ascending=True)]
    mean: Annotated[Tensor, lambda _: _number(-LARGEST, LARGEST)]


@dataclass(frozen=True)
class ClientState:
    """State of a client: what it shares, and in the end what others have.

    Attributes:
        place: (s,) int32 places of shared users and items among its tags.
        mean: (C,) float64 of all clients' training ratings, as far as its items are shared.
        bias: (n,) of users and items, while turns go on.
        total: (s,) sum of other clients' residuals, in the end.
        number: (s,) int64 number of other clients' training ratings, in the end.
    """

    PREFIX: ClassVar[str] = SHARED
    place: Annotated[Mapping[str, Ragged], by_side("place", torch.int32, low=0)]
    mean: Annotated[Stacked, FieldSpec(Stacked, (), torch.float64)]
    bias: Annotated[Ragged | None, FieldSpec(Ragged, (), torch.float64, rows=NODES, optional=True)]
    total: Annotated[
        Mapping[str, Ragged] | None, by_side("total", rows=OWN_PLACES, optional=True)
    ] = None
    number: Annotated[
        Mapping[str, Ragged] | None,
        by_side("number", torch.int64, rows=OWN_PLACES, low=0, optional=True),
    ] = None


@dataclass(frozen=True)
class ItemBiases:
    """Biases (s,) of shared items, in the order of their places."""

    item: Annotated[Ragged, lambda _: _values("state/shared/place/item")]


@dataclass(frozen=True)
class UserSums:
    """Sums (s,) of the residuals of shared users."""

    user: Annotated[Ragged, lambda _: _values("")]

    def find_problem(self, request: ItemBiases, cfg: Sharing) -> str | None:
        """Return which sums are NaN or infinite, or None."""
        del request, cfg
        return _finite_problem(self.user)


@dataclass(frozen=True)
class UserBiases:
    """Biases (s,) of shared users."""

    user: Annotated[Ragged, lambda _: _values("state/shared/place/user")]


@dataclass(frozen=True)
class ItemSums:
    """Sums (s,) of the residuals of shared items."""

    item: Annotated[Ragged, lambda _: _values("")]

    def find_problem(self, request: UserBiases, cfg: Sharing) -> str | None:
        """Return which sums are NaN or infinite, or None."""
        del request, cfg
        return _finite_problem(self.item)


@dataclass(frozen=True)
class OtherSums:
    """What the other clients have of the shared users and items of a client.

    Attributes:
        total: (s,) sums of residuals.
        number: (s,) int64 training ratings.
    """

    total: Annotated[Mapping[str, Ragged], by_side("total", rows=STATE_PLACES)]
    number: Annotated[
        Mapping[str, Ragged], by_side("number", torch.int64, rows=STATE_PLACES, low=0)
    ]


def _number(low: float, high: float) -> FieldSpec:
    """Return the spec of one number for all clients, float64."""
    return FieldSpec(Shared, (), torch.float64, low=low, high=high)


def _values(rows: str) -> FieldSpec:
    """Return the spec of numbers of shared users or items."""
    return FieldSpec(Ragged, (), torch.float64, rows=rows or NODES, fewer=not rows)


def _finite_problem(sums: Ragged) -> str | None:
    return None if bool(sums.t.isfinite().all()) else "finite sums, got NaN or infinity"


# --- At the clients ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Ratings:
    """The training ratings of one client.

    Attributes:
        ends: (R,) int64 rows of their users, and of their items.
        value: (R,) float64.
        tag: (k,) int64 of users and of items, ascending.
        row: (k,) int64 rows of these.
    """

    ends: Mapping[str, Tensor]
    value: Tensor
    tag: Mapping[str, Tensor]
    row: Mapping[str, Tensor]


def _ratings_of(block: ClientBlock) -> _Ratings:
    """Return the training ratings of one client, worked out once."""
    return block.once("ratings to share", _Ratings, lambda: _build_ratings(block))


def _build_ratings(block: ClientBlock) -> _Ratings:
    pairs, words = pairs_of(block), words_of_rows(block.ids[0], block.row_key)
    train = block.split.train[pairs.row]
    ends = {"user": pairs.user[train], "item": pairs.item[train]}
    tags = {"user": words if block.user_tag is None else block.user_tag, "item": words}
    rows, own_tags = {}, {}
    for column, side in enumerate(SIDES):
        of_side = (kinds(block.x)[:, column] > 0).nonzero()[:, 0]
        own_tags[side], order = tags[side][of_side].sort()
        rows[side] = of_side[order]
    return _Ratings(ends, block.y[pairs.row[train]].double(), own_tags, rows)


def _shared_rows(block: ClientBlock, place: Mapping[str, Ragged], side: str) -> Tensor:
    """Return the rows (s,) of shared users or items; raise `ProtocolError` for no own ones."""
    rows, places = _ratings_of(block).row[side], place[side].t.long()
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(rows):
        raise ProtocolError(f"expected places among {len(rows)} tags of {side}s, got others")
    return rows[places]


def _one(t: Tensor) -> Ragged:
    """Return rows of the only client of a block."""
    return Ragged(t, offsets(torch.tensor([len(t)], device=t.device)))


@op(Kind.STATISTICS)
def send_tags(clients: Clients, state: Empty, _: Empty) -> tuple[Empty, OwnTags]:
    """Send tags, numbers of ratings, and the sum of all."""
    block, sharing = require_one_client(clients.block), _sharing_in(clients)
    ratings, tag, rated = _ratings_of(block), {}, {}
    for side in SIDES:
        number = torch.bincount(ratings.ends[side], minlength=len(block.y))[ratings.row[side]]
        sent = len(number) if side in sharing.sides else 0
        tag[side] = _one(ratings.tag[side][:sent])
        rated[side] = _one(number[:sent].int())
    total = ratings.value.sum()[None]
    return state, OwnTags(tag, rated, Stacked(block.num_train), Stacked(total))


@op(Kind.STATISTICS)
def store_places(
    clients: Clients, _state: Empty, request: SharedPlaces
) -> tuple[ClientState, Empty]:
    """Store which users and items are shared, and begin with biases of 0."""
    block = require_one_client(clients.block)
    ratings = _ratings_of(block)
    rows = {side: _shared_rows(block, request.place, side) for side in SIDES}
    is_shared = torch.zeros(len(block.y), dtype=torch.float64, device=block.y.device)
    is_shared[rows["item"]] = 1
    count = max(len(ratings.value), 1)
    share = is_shared[ratings.ends["item"]].sum() / count
    mean = share * request.mean + (1 - share) * ratings.value.sum() / count
    bias = Ragged(torch.zeros_like(is_shared), block.off)
    return ClientState(request.place, Stacked(mean[None]), bias), Empty()


@op(Kind.STATISTICS)
def send_user_sums(
    clients: Clients, state: ClientState, request: ItemBiases
) -> tuple[ClientState, UserSums]:
    """Take biases of shared items, solve the client's own users, and send sums of shared ones."""
    new, sums = _half_turn(clients, state, "item", request.item, "user")
    return new, UserSums(sums)


@op(Kind.STATISTICS)
def send_item_sums(
    clients: Clients, state: ClientState, request: UserBiases
) -> tuple[ClientState, ItemSums]:
    """Take biases of shared users, solve the client's own items, and send sums of shared ones."""
    new, sums = _half_turn(clients, state, "user", request.user, "item")
    return new, ItemSums(sums)


def _half_turn(
    clients: Clients, state: ClientState, fixed: str, biases: Ragged, solved: str
) -> tuple[ClientState, Ragged]:
    """Return the state with new biases of one side, and the sums (s,) of its shared rows.

    Args:
        clients: one client.
        state: its state.
        fixed: side of which shared biases have come.
        biases: (s,) these.
        solved: the other side, whose biases are solved for these.
    """
    block = require_one_client(clients.block)
    ratings, damping = _ratings_of(block), _sharing_in(clients).damping
    fixed_rows, shared_rows = (_shared_rows(block, state.place, s) for s in (fixed, solved))
    if state.bias is None or len(biases.t) != len(fixed_rows):
        raise ProtocolError(f"expected biases of {len(fixed_rows)} shared {fixed}s, got others")
    bias = state.bias.t.clone()
    bias[fixed_rows] = biases.t.double()
    # Residuals less the fixed side, added up by rows of the other one.
    residual = ratings.value - state.mean.t[0] - bias[ratings.ends[fixed]]
    ends = ratings.ends[solved]
    sums = torch.zeros_like(bias).index_add_(0, ends, residual)
    number = torch.bincount(ends, minlength=len(bias)) + damping
    bias[ends] = (sums / number)[ends]  # of shared ones until the server's come
    report_rows(block.off, PER_TURN)
    new = replace(state, bias=Ragged(bias, block.off))
    return new, _one(sums[shared_rows])


@op(Kind.STATISTICS)
def store_sums(
    _clients: Clients, state: ClientState, request: OtherSums
) -> tuple[ClientState, Empty]:
    """Store what other clients have of shared users and items."""
    return replace(state, bias=None, total=request.total, number=request.number), Empty()


def _sharing_in(clients: Clients) -> Sharing:
    sharing = sharing_of(clients.cfg.model)
    if sharing is None:
        raise ProtocolError("expected a model with shared biases, got one without")
    return sharing


def with_shared_sums(block: ClientBlock, state: State) -> ClientBlock:
    """Return the block with the sums of other clients that are in the state, if there are any."""
    if f"{NUMBER}/item" not in state or not sum(len(state[f"{NUMBER}/{s}"].t) for s in SIDES):
        return block
    stored = from_payload(ClientState, state)
    assert stored.total is not None  # they come together
    assert stored.number is not None
    total = block.y.new_zeros(len(block.y), dtype=torch.float64)
    number = torch.zeros_like(total)
    for side in SIDES:
        rows = _shared_rows(require_one_client(block), stored.place, side)
        total[rows], number[rows] = stored.total[side].t.double(), stored.number[side].t.double()
    sums = SharedSums(stored.mean.t[0], total, number)
    cached = block.memo.get("shared sums")
    if (
        isinstance(cached, ClientBlock)
        and cached.shared is not None
        and cached.shared.is_same(sums)
    ):
        return cached
    block.memo["shared sums"] = with_sums = block.with_shared(sums)
    return with_sums


# --- At the server -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Slots:
    """Shared users or items of all clients.

    Attributes:
        size: S, how many there are.
        number: (S,) int64 training ratings of each.
        slot: (s of all clients) int64 slot of each shared row of each client.
        place: their places among the tags of their clients.
        own_number: (s of all clients) int64 training ratings of each there.
    """

    size: int
    number: Tensor
    slot: Tensor
    place: Ragged
    own_number: Tensor

    def add_up(self, sums: Tensor) -> Tensor:
        """Return the sums (S,) float64 of all clients, added in their order."""
        total = torch.zeros(self.size, dtype=torch.float64)
        return total.index_add_(0, self.slot, sums.double().cpu())

    def to_clients(self, values: Tensor) -> Ragged:
        """Return values (S,) as each client's own rows need them."""
        return Ragged(values[self.slot], self.place.off)


def _match(tag: Ragged, rated: Ragged, min_silos: int) -> _Slots:
    """Return the shared slots of users or items: those that enough clients have rated."""
    words, slot = torch.unique(tag.t.cpu(), return_inverse=True)
    number = rated.t.cpu().long()
    silos = torch.bincount(slot[number > 0], minlength=len(words))
    is_shared = silos >= min_silos
    is_shared_row = is_shared[slot]
    shared_slot = (is_shared.long().cumsum(0) - 1)[slot[is_shared_row]]
    client = owners(tag.off.cpu())
    place = (torch.arange(len(slot)) - tag.off.cpu()[client])[is_shared_row].int()
    runs = torch.bincount(client[is_shared_row], minlength=len(tag.off) - 1)
    own_number = number[is_shared_row]
    size = int(is_shared.sum())
    total = torch.zeros(size, dtype=torch.int64).index_add_(0, shared_slot, own_number)
    return _Slots(size, total, shared_slot, Ragged(place, offsets(runs)), own_number)


ORDER = (
    send_tags,
    store_places,
    repeat(send_user_sums, send_item_sums, at_most=lambda _: TURNS),
    anyone(store_sums),
)


def sharing_steps(sharing: Sharing, key: Key) -> Steps:
    """Return the calls of `share_biases`."""
    return steps_of(ORDER, CallContext(sharing, key))


def sharing_state(sharing: Sharing) -> FieldSpecs:
    """Return what the state holds of shared biases."""
    return specs_of(ClientState, sharing)


def share_biases(fed: Federation, sharing: Sharing, key: Key) -> dict[str, int]:
    """Solve the biases of shared users and items of all clients; return how many there are.

    Args:
        fed: the federation.
        sharing: what is shared.
        key: of the calls; nothing is drawn.
    """

    def call(op: ClientOp[Request, Any], request: Request) -> Payload:
        rows = op.declaration.reply is not Empty
        return fed.call(op, to_payload(request), what=Kind.STATISTICS, key=key, rows=rows)

    # 1. Find what is shared.
    sent = from_payload(OwnTags, call(send_tags, Empty()))
    slots = {side: _match(sent.tag[side], sent.rated[side], sharing.min_silos) for side in SIDES}
    ratings, total = int(sent.ratings.t.sum()), float(sent.total.t.sum())
    mean = torch.tensor(total / max(ratings, 1), dtype=torch.float64)
    places = {side: slots[side].place for side in SIDES}
    call(store_places, SharedPlaces(places, mean))
    sizes = {side: slots[side].size for side in SIDES}
    if not any(sizes.values()):
        return sizes
    # 2. Solve for users and items in turns.
    user, item = slots["user"], slots["item"]
    item_bias = torch.zeros(item.size, dtype=torch.float64)
    user_sums, item_sums = torch.zeros(0), torch.zeros(len(item.slot), dtype=torch.float64)
    for _ in range(TURNS):
        request = ItemBiases(item.to_clients(item_bias))
        user_sums = call(send_user_sums, request)["user"].t
        user_bias = user.add_up(user_sums) / (user.number + sharing.damping)
        request_of_items = UserBiases(user.to_clients(user_bias))
        previous = item_sums
        item_sums = call(send_item_sums, request_of_items)["item"].t.cpu()
        item_bias = item.add_up(item_sums) / (item.number + sharing.damping)
        if not bool(((item_sums - previous).abs() > TOLERANCE).any()):
            break
    # 3. Give each client what the others have.
    own_sums = {"user": user_sums, "item": item_sums}
    others_total, others_number = {}, {}
    for side, of_side in slots.items():
        all_sums = of_side.to_clients(of_side.add_up(own_sums[side]))
        others_sum = all_sums.t - own_sums[side].double().cpu()
        others_total[side] = Ragged(others_sum, of_side.place.off)
        all_numbers = of_side.to_clients(of_side.number)
        others_number[side] = Ragged(all_numbers.t - of_side.own_number, of_side.place.off)
    call(store_sums, OtherSums(others_total, others_number))
    return sizes
