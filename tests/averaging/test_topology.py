"""Topologies as mixing matrices on 2 to 32 simulated replicas, and beside decent-dp's."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.errors import raises
from trainyard.averaging.topology import BUILT_IN, Round, rounds

SIZES = range(2, 33)
POWERS = [2, 4, 8, 16, 32]


def matrix(groups: Round, size: int) -> np.ndarray:
    """x becomes matrix @ x: each replica has the mean of its group."""
    mixing = np.zeros((size, size))
    for group in groups:
        mixing[np.ix_(group, group)] = 1 / len(group)
    return mixing


def period(found: list[Round], size: int) -> np.ndarray:
    product = np.eye(size)
    for groups in found:
        product = matrix(groups, size) @ product
    return product


def distance_of(mixing: np.ndarray) -> float:
    """The spectral radius of what a matrix leaves of disagreements."""
    size = len(mixing)
    return float(np.abs(np.linalg.eigvals(mixing - np.full((size, size), 1 / size))).max())


def is_exact(found: list[Round], size: int) -> bool:
    return bool(np.allclose(period(found, size), 1 / size, rtol=0, atol=1e-15))


# --- what a period does ---


@pytest.mark.parametrize("size", SIZES)
def test_complete_mixes_exactly_in_one_round(size: int) -> None:
    found = rounds("complete", size)
    assert len(found) == 1
    assert is_exact(found, size)


@pytest.mark.parametrize("size", POWERS)
def test_one_peer_exponential_mixes_exactly_in_log2_rounds_of_pairs(size: int) -> None:
    found = rounds("one-peer-exponential", size)
    assert 2 ** len(found) == size
    assert {len(group) for groups in found for group in groups} == {2}
    assert is_exact(found, size)
    assert not is_exact(found[:-1], size)
    # Wherever a run begins or goes on.
    assert is_exact(found[1:] + found[:1], size)


LAYOUTS = [
    (nodes * local, local) for nodes in POWERS for local in (1, 2, 3, 8) if nodes * local < 33
]


@pytest.mark.parametrize(("size", "local_size"), LAYOUTS)
def test_alternating_exponential_ring_mixes_exactly(size: int, local_size: int) -> None:
    found = rounds("alternating-exponential-ring", size, local_size)
    num_nodes = size // local_size
    assert len(found) == 2 * np.log2(num_nodes)
    assert is_exact(found, size)
    for groups in found:
        assert {len(group) for group in groups} <= {local_size, 2 * local_size}
    if num_nodes >= 4:  # half of the nodes keep to themselves
        counts = [sum(len(group) == local_size for group in groups) for groups in found]
        assert counts == [num_nodes // 2] * len(found)


@pytest.mark.parametrize("size", [size for size in SIZES if size % 2 == 0])
def test_an_even_ring_mixes_at_its_rate(size: int) -> None:
    """cos^2(2 pi / n) per two rounds in the long run, and its root at most in the first two; two
    and four replicas are mixed exactly."""
    found = rounds("ring", size)
    assert len(found) == (2 if size > 2 else 1)
    assert {len(group) for groups in found for group in groups} == {2}
    angle = 2 * np.pi / size if size > 2 else np.pi / 2
    mixed = period(found, size)
    assert distance_of(mixed) == pytest.approx(np.cos(angle) ** 2, abs=1e-7)
    for k in (1, 2, 3):
        left = np.linalg.norm(np.linalg.matrix_power(mixed, k) - 1 / size, ord=2)
        assert left == pytest.approx(np.cos(angle) ** (2 * k - 1), abs=1e-7)
    assert is_exact(found, size) == (size <= 4)


@pytest.mark.parametrize("size", [size for size in SIZES if size % 2])
def test_an_odd_ring_mixes_at_its_rate_and_each_replica_rests_once(size: int) -> None:
    found = rounds("ring", size)
    assert len(found) == size
    resting = [[group for group in groups if len(group) == 1] for groups in found]
    assert resting == [[(replica,)] for replica in range(size)]
    half = (size - 1) // 2
    roots = np.roots([1, 1, *[0] * (half - 1), -2])
    others = roots[np.abs(roots - 1) > 1e-6]
    assert len(others) == half
    per_round = np.abs(1 + others).max() / 2
    # The radius of a matrix whose eigenvectors are far from orthogonal is known less well.
    assert distance_of(period(found, size)) ** (1 / size) == pytest.approx(per_round, rel=1e-4)


@pytest.mark.parametrize("topology", BUILT_IN)
def test_one_replica_of_a_kind(topology: str) -> None:
    if topology == "alternating-exponential-ring":
        with raises("recipe.topology-not-power-of-two", allowed="2, 4, 8, ...", num_found=1):
            rounds(topology, 1)
    else:
        assert rounds(topology, 1) == [[(0,)]]


# --- the peer ---


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("complete", "complete"),
        ("ring", "ring"),
        ("one-peer-exponential", "one-peer-exp"),
        ("alternating-exponential-ring", "alternating-exp-ring"),
    ],
)
@pytest.mark.parametrize(("size", "local_size"), [(4, 2), (8, 2), (16, 2), (16, 4), (32, 8)])
def test_the_rounds_are_decent_dps(ours: str, theirs: str, size: int, local_size: int) -> None:
    """Of its 0.2.3, whose edges are listed without the process groups that it makes of them."""
    topo = pytest.importorskip("decent_dp.topo", reason="the peer is not installed")
    registered = topo.TopologyReg.registry[theirs]
    peer = registered.__new__(registered)
    peer._world_size, peer._local_world_size = size, local_size
    peer._n_nodes = size // local_size
    edges = peer._get_topo_edges()
    assert [{tuple(sorted(edge.ranks)) for edge in groups} for groups in edges] == [
        set(groups) for groups in rounds(ours, size, local_size)
    ]
    for edge in [edge for groups in edges for edge in groups]:
        assert edge.weight == pytest.approx(1 / len(edge.ranks))


# --- one's own, and mistakes ---


def star(size: int, local_size: int) -> list[list[list[int]]]:
    """Rank 0 with each of the others in turn, who rest otherwise; in no order."""
    return [
        [[peer, 0], *([other] for other in range(1, size) if other != peer)]
        for peer in range(1, size)
    ]


def test_a_function_of_ones_own() -> None:
    assert rounds(f"{__name__}:star", 3) == [[(0, 1), (2,)], [(0, 2), (1,)]]
    assert distance_of(period(rounds(f"{__name__}:star", 8), 8)) < 1
    assert rounds(f"{__name__}:numpy_integers", 4) == [[(0, 1), (2, 3)]]


def numpy_integers(size: int, local_size: int) -> np.ndarray:
    return np.arange(size).reshape(1, -1, 2)


def fails(size: int, local_size: int) -> None:
    raise KeyError("what")


def giving(found: object) -> object:
    return lambda size, local_size: found


@pytest.mark.parametrize(
    ("function", "round_", "rank", "num_times"),
    [
        (giving([[[0, 1], [2, 3]], [[0, 1], [1, 2, 3]]]), 1, 1, 2),
        (giving([[[0, 1], [2]]]), 0, 3, 0),
        (giving([[[0, 1], [2, 3], [4]]]), 0, 4, 1),
    ],
)
def test_a_rank_that_is_not_once_in_a_round_is_named(
    function: object, round_: int, rank: int, num_times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "wrong", function)
    fields = {"round": round_, "rank": rank, "num_times": num_times, "last_rank": 3}
    with raises("recipe.topology-rank-not-once", key="average.topology", **fields):
        rounds(f"{__name__}:wrong", 4)


@pytest.mark.parametrize(
    ("function", "code", "reason"),
    [
        (giving([]), "recipe.topology-without-rounds", ""),
        (giving([[[0.0, 1.0], [2.0, 3.0]]]), "function.failed", "TypeError: "),
        (giving(3), "function.failed", "TypeError: "),
        (fails, "function.failed", "KeyError: 'what'"),
        (3, "function.not-callable", ""),
    ],
)
def test_mistakes_in_a_function_are_named(
    function: object, code: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "wrong", function)
    with raises(code, key="average.topology") as caught:
        rounds(f"{__name__}:wrong", 4)
    fields = caught.value.fields
    assert str(fields.get("reason", "")).startswith(reason)
    assert function is not fails or "tests/averaging/test_topology.py, line" in str(fields["place"])


def test_other_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises("recipe.unknown-topology", value="one-peer-exp") as caught:
        rounds("one-peer-exp", 4)
    assert "'one-peer-exponential'" in str(caught.value.fields["hint"])
    with raises("function.not-found", path=__file__, name="absent"):
        rounds(f"{__name__}:absent", 4)
    with raises("function.module-not-found", module="nowhere"):
        rounds("nowhere:f", 4)
    with raises("recipe.topology-not-power-of-two", allowed="1, 2, 4, ...", num_found=6):
        rounds("one-peer-exponential", 6)
    (tmp_path / "mine.py").write_text("def f(size, local_size): return [[range(size)]]")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    assert rounds("mine:f", 3) == [[(0, 1, 2)]]


def test_only_modules_of_the_working_directory_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe of somebody else's could call `os:kill`, with process 2 and signal 1 for 2 ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for wanted in ("os:kill", "torch.hub:load", "trainyard.files:sha256"):
        module = wanted.partition(":")[0].replace(".", "/")
        with raises("function.module-not-found", module=module, path=tmp_path):
            rounds(wanted, 2)
    (tmp_path / "os.py").write_text("def kill(size, local_size): return [[range(size)]]")
    with raises("function.module-hidden", path=tmp_path / "os.py"):
        rounds("os:kill", 2)


def test_4096_ranks_are_listed() -> None:
    """0.1 s for all four: each rank of a run lists all groups, to find its own."""
    counts = [len(rounds(topology, 4096, 8)) for topology in BUILT_IN]
    assert counts == [1, 2, 12, 18]
