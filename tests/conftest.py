"""Small generated graphs and blocks, shared by all tests."""

import gc
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unsynced  # noqa: F401
from commands import save
from pretended import register
from silograph.core.key import Key
from silograph.experiment.resolve.resolve import SimulatedRun
from silograph.experiment.run.setup import Setup, set_up
from silograph.graph.block.block import ClientBlock, Route, make_block
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING, Graph
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import draw_split
from silograph.methods import METHODS

# Presets differ in options alone: batteries take these in the slow suite.
PRESETS_APART = {
    "fedall",
    "fedrandom",
    "fedpns",
    "fedais1",
    "fedais2",
    "stale",
    "fedsage_local",
    "fedacs",
    "fesog",
}
MANY_TESTS = 1000  # from which on compiling before the first one pays
OWN_TESTS = (
    "test_fedais.py",
    "test_fedsage.py",
    "test_defaults.py",
    "test_program.py",
    "test_cli.py",
)

# Crossings of methods or layers with further settings: by default each of them meets one of the
# settings, by turns, so that every setting is met; all crossings are in the slow suite.
BY_TURNS = {
    "test_a_block_is_its_clients_one_by_one",
    "test_a_block_of_many_is_many_blocks_of_one",
    "test_a_client_without_neighbors_in_others_and_several_labels_a_node",
    "test_a_module_written_as_gcn_is_gcn",
    "test_a_multilabel_graph_runs_and_reports",
    "test_all_rows_are_centralized_training",
    "test_every_method_trains_every_kind_of_layer",
    "test_global_training_is_centralized_training",
    "test_parts_are_the_same_on_a_pretended_device",
    "test_resumed_in_every_round",
    "test_several_clients_each_draw_from_their_own_graph",
    "test_strict_is_not_strict_bitwise",
    "test_subgraphs_of_all_nodes_are_centralized_training",
    "test_the_same_config_gives_the_same_bits",
    "test_the_same_on_a_pretended_device",
    "test_threads_change_no_bit_of_a_compiled_run",
    "test_tiers_agree",
    "test_tiers_give_the_same_model_and_the_same_ledger",
}

# Laws with many cases that take long: by default a third of the cases, on the diagonal of their
# parameters, so that a law of two parameters with three values each meets every value; and another
# diagonal in each law, so that every method or layer meets a third of the laws. The slow suite has
# all.
BY_THIRDS = (
    "test_a_block_of_many_is_many_blocks_of_one",
    "test_a_client_without_neighbors_in_others_and_several_labels_a_node",
    "test_a_flag_and_its_key_are_the_same",
    "test_a_module_written_as_gcn_is_gcn",
    "test_a_multilabel_graph_runs_and_reports",
    "test_a_pull_to_the_start",
    "test_a_recipe_finds_its_lines_and_writes_its_page",
    "test_a_recipe_without_lines_has_a_page",
    "test_a_run_by_its_program_is_the_run",
    "test_a_run_on_the_folders_is_the_run_on_the_cut",
    "test_all_rows_are_centralized_training",
    "test_block_size_changes_no_bit_of_a_compiled_run",
    "test_both_backends_do_the_same",
    "test_both_tiers_and_all_blocks_train_alike",
    "test_clients_score_what_they_receive",
    "test_drawn_rows_are_unbiased_given_that_they_are_drawn",
    "test_dropout_of_features",
    "test_every_layer_trains_the_same_in_blocks",
    "test_every_method_of_silos_can_be_attacked",
    "test_every_method_trains_every_kind_of_layer",
    "test_every_model_learns_a_planted_graph",
    "test_every_model_trains_is_saved_and_goes_on",
    "test_global_training_is_centralized_training",
    "test_grouping_changes_no_bit",
    "test_it_goes_with_other_parts",
    "test_killed_and_resumed_in_blocks_and_over_a_session_it_is_the_same",
    "test_killed_and_resumed_or_over_a_session_it_is_the_same",
    "test_layers_and_schedules",
    "test_ledger_does_not_depend_on_blocks",
    "test_many_draws_agree_within_their_spread",
    "test_methods_beat_the_mean",
    "test_methods_learn_numbers",
    "test_numbering_and_order_change_nothing",
    "test_one_client_with_kept_optimizer_is_centralized_training",
    "test_optimizers_and_starts",
    "test_resumed_in_every_round",
    "test_scores_are_the_same",
    "test_scores_do_not_depend_on_how_often_rounds_are_judged",
    "test_several_clients_each_draw_from_their_own_graph",
    "test_slots_hold_what_an_oracle_says",
    "test_strict_is_not_strict_bitwise",
    "test_subgraphs_of_all_nodes_are_centralized_training",
    "test_sums_of_drawn_senders_are_unbiased_where_all_rows_are_evaluated",
    "test_test_labels_decide_nothing",
    "test_the_norm_of_an_update_is_that_of_what_is_added",
    "test_the_same_config_gives_the_same_bits",
    "test_threads_change_no_bit_of_a_compiled_run",
    "test_tiers_give_the_same_model_and_the_same_ledger",
    "test_unequal_widths_and_a_linear_head_are_trained_as_centrally",
    "test_used_rows_change_nothing_but_bytes",
    "test_variates_outlive_a_rate_that_vanishes",
    "test_what_a_round_costs_is_known_before_it",
    "test_parts_are_the_same_on_a_pretended_device",
    "test_what_was_written_out_makes_the_same_run",
    "test_without_validation_nodes_the_last_round_counts",
    "test_without_weight_it_is_fedavg",
    # A law's place decides its diagonal: what comes later has its place below.
    "test_numbers_are_predicted_by_the_program",
    "test_a_round_that_lost_its_network_is_done_again",
    "test_silo_processes_give_the_bits_and_the_ledger_of_a_simulation",
    "test_a_run_goes_on_after_its_server_died",
    "test_neighbors_tell_more_than_features_alone",
    "test_runs_show_what_the_ledger_gives",
    "test_blocks_of_any_size_give_the_same",
    "test_methods_run_unchanged_under_the_strictest_policy_that_allows_them",
    "test_a_method_uses_weights_or_refuses_them",
    "test_folders_of_a_cut_give_its_blocks",
    "test_patched_replies_lose_nothing_on_the_wire",
    "test_the_sum_over_drawn_neighbors_is_unbiased",
    "test_a_run_goes_on_from_where_it_was",
    "test_selectors_choose_among_clients_with_ratings",
    "test_the_best_round_is_read_off_the_table",
    "test_lines_are_of_the_cells_that_their_labels_name",
    "test_flags_over_the_file_of_a_run_are_flags_over_what_was_given",
    "test_a_run_is_judged_on_the_whole_graph_and_resumes_its_bits",
    "test_the_result_does_not_depend_on_the_block_size",
    "test_nothing_depends_on_when_rounds_are_scored",
    "test_drawn_edges_keep_their_weights",
    "test_runs_beat_the_mean_and_one_client_is_the_centralized_run",
    "test_an_interrupted_run_goes_on_to_the_same_bits",
    "test_a_run_that_died_resumes_to_the_bit",
    "test_without_a_pull_it_is_fedavg_bit_for_bit",
    "test_sums_of_a_drawn_node_are_unbiased",
    "test_a_session_is_the_same_to_the_bit",
    "test_two_clusters_are_two_runs_of_fedavg",
    "test_bytes_are_those_of_the_base",
    "test_killed_and_resumed_and_over_a_session_knobs_are_the_same",
    "test_killed_and_resumed_it_chooses_the_same",
    "test_widths_and_heads",
    "test_they_are_in_the_checkpoint",
    "test_a_run_keeps_its_budget",
    "test_with_nothing_private_it_is_fedavg_bit_for_bit",
    "test_clients_of_one_community_take_more_of_each_other",
    "test_all_ways_to_compute_agree",
    "test_fedper_is_the_loop_over_clients",
    "test_centralized_training_has_none",
    "test_drawn_training_does_not_depend_on_blocks",
    "test_counts_converge_to_the_probabilities",
    "test_subgraphs_are_drawn_as_often_as_they_should",
    "test_every_set_of_neighbors_is_equally_likely",
    "test_a_limit_of_bytes_is_kept_to_the_last_round",
)

MakeGraph = Callable[..., Graph]
MakeBlock = Callable[..., tuple[ClientBlock, Route]]


@pytest.hookimpl(tryfirst=True)  # before what is slow is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or item.path.name in OWN_TESTS:
            continue
        if any(isinstance(v, str) and v in PRESETS_APART for v in call.params.values()):
            item.add_marker(pytest.mark.slow)
    leave_by_turns(items)
    leave_by_thirds(items)


def leave_by_thirds(items: list[pytest.Item]) -> None:
    """Mark the cases that are not on the diagonal of their law as slow, unless none is on it."""
    laws: dict[str, list[tuple[int, pytest.Item]]] = {}
    known: dict[tuple[str, str], list[str]] = {}
    for item in items:
        call, name = getattr(item, "callspec", None), item.name.partition("[")[0]
        if call is None or name not in BY_THIRDS or item.get_closest_marker("slow"):
            continue
        law, place = f"{item.path}::{name}", BY_THIRDS.index(name)
        for parameter, value in call.params.items():
            values = known.setdefault((law, parameter), [])
            if str(value) not in values:
                values.append(str(value))
            place += values.index(str(value))
        laws.setdefault(law, []).append((place % 3, item))
    for cases in laws.values():
        first = min(place for place, _ in cases)
        for place, item in cases:
            if place != first:
                item.add_marker(pytest.mark.slow)


def leave_by_turns(items: list[pytest.Item]) -> None:
    """Mark all but one crossing of each method or layer as slow."""
    crossings: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        call, name = getattr(item, "callspec", None), item.name.partition("[")[0]
        if call is None or name not in BY_TURNS or item.get_closest_marker("slow"):
            continue
        methods = [v for v in call.params.values() if isinstance(v, str) and v in METHODS]
        own = methods[0] if methods else call.id.partition("-")[0]
        crossings.setdefault(f"{item.path}::{name}", {}).setdefault(own, []).append(item)
    for by_name in crossings.values():
        for turn, cases in enumerate(by_name.values()):
            for place, item in enumerate(cases):
                if place != turn % len(cases):
                    item.add_marker(pytest.mark.slow)


def pytest_sessionstart() -> None:
    register()
    # What is collected stays to the end: the garbage collector need not walk it again and again.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Have each of two workers compile the kernels of one precision; see compile_kernels.py."""
    worker = getattr(session.config, "workerinput", {}).get("workerid", "")
    dtype = {"gw0": "float32", "gw1": "float64"}.get(worker)
    if dtype and len(session.items) > MANY_TESTS and importlib.util.find_spec("numba"):
        script = Path(__file__).with_name("compile_kernels.py")
        subprocess.run([sys.executable, script, dtype], check=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one fixed order, whatever the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def planted_graph(
    n: int = 60,
    classes: int = 3,
    features: int = 7,
    *,
    seed: int = 0,
    sparse: bool = False,
    multilabel: bool = False,
    missing: float = 0.0,
) -> Graph:
    """Return a graph whose classes show in features and edges; `missing` labels are unknown."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    near = np.where(y[:, None] == y[None, :], 0.2, 0.03)
    upper = np.triu(rng.random((n, n)) < near, 1)
    rows, cols = np.nonzero(upper | upper.T)
    adj = CSR.from_pairs(torch.from_numpy(rows), torch.from_numpy(cols), (n, n))
    centers = rng.normal(size=(classes, features))
    x = torch.from_numpy((centers[y] + rng.normal(size=(n, features))).astype(np.float32))
    labels = torch.from_numpy(y.astype(np.int64))
    if multilabel:
        labels = torch.from_numpy((rng.random((n, classes)) < 0.3).astype(np.int64))
        labels[torch.arange(n), torch.from_numpy(y)] = 1
    if missing:
        labels[torch.from_numpy(rng.random(n) < missing)] = MISSING
    if sparse:
        x = x * torch.from_numpy(rng.random((n, features)) < 0.4)
    return Graph(
        adj=adj,
        x=_sparse(x) if sparse else x,
        y=labels,
        num_classes=classes,
        node_id=np.arange(n) * 3 + 11,
        name="planted",
    )


def _sparse(x: torch.Tensor) -> CSR:
    import scipy.sparse as sp

    return CSR.from_scipy(sp.csr_matrix(x.numpy()))


def block_of(
    graph: Graph,
    clients: int = 4,
    *,
    partition: Partition | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[ClientBlock, Route]:
    """Return a graph cut at random, all clients as one block, in float64."""
    if partition is None:
        partition = make_partition(graph, "random", clients=clients, key=Key.of(seed))
    split = draw_split(graph, partition, ratios=(0.4, 0.3, 0.3), key=Key.of(seed + 1))
    return make_block(graph, partition, split, dtype)


@pytest.fixture(scope="session")
def make_graph() -> MakeGraph:
    return planted_graph


@pytest.fixture
def cut_block() -> MakeBlock:
    return block_of


@pytest.fixture
def work(tmp_path: Path, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a graph of 60 nodes; its parent has no shared data."""
    folder = tmp_path / "home" / "work"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("SILOGRAPH_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    save("g.npz", make_graph())
    return folder


@pytest.fixture
def setups(monkeypatch: pytest.MonkeyPatch) -> list[Setup]:
    """Every set-up that runs make while the test goes."""
    seen: list[Setup] = []

    def spy(run: SimulatedRun) -> Setup:
        seen.append(set_up(run))
        return seen[-1]

    monkeypatch.setattr("silograph.experiment.run.run.set_up", spy)
    return seen


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that silograph starts are forked from one that has all imports behind it."""
    from forked import popen
    from processes import begin_forks

    begin_forks()
    monkeypatch.setattr("subprocess.Popen", popen)


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes hubs of this machine, which close with the test.

    They wait longer than others for who says who it is, for this machine may be busy.
    """
    from sessions import TOKEN
    from silograph.federation.session.hub import Hub

    monkeypatch.setattr("silograph.federation.session.hub.HANDSHAKE_SECONDS", 600.0)
    made = []

    def make(register: Any, **other: Any) -> Hub:
        credentials = other.pop("credentials", None)
        made.append(Hub("127.0.0.1:0", register, TOKEN, credentials, room=2, **other))
        return made[-1]

    yield make
    for hub in made:
        hub.close()


@pytest.fixture
def raws() -> Iterator[Any]:
    """Makes streams to hubs on which anything can be said, which close with the test."""
    from streams import Raw

    made = []

    def make(hub: Any) -> Raw:
        made.append(Raw(hub))
        return made[-1]

    yield make
    for raw in made:
        raw.close()
