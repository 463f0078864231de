"""Decisions that all ranks share, the groups in which they talk, and whose device is whose."""

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.errors import raises
from tests.gpus import pretend
from tests.spawn import spawn
from trainyard import world as world_module
from trainyard.errors import DataError, PeerError
from trainyard.training.stop import StopSignal
from trainyard.world import (
    World,
    check_devices,
    cores_per_rank,
    gather,
    in_turns,
    new_group,
    own_device,
    pick_device,
    together,
    total,
    with_cores,
)

LIMIT = timedelta(days=1)


def _talk(world: World) -> tuple[list[int], float, float, list[str]]:
    mine = torch.tensor(float(world.rank + 1))
    turns: list[str] = []
    in_turns(world, lambda: turns.append(f"rank {world.rank}"))
    return gather(world, world.rank), float(total(world, mine)), float(mine), turns


def test_collectives() -> None:
    for rank, (ranks, summed, mine, turns) in enumerate(spawn(_talk, 3)):
        assert ranks == [0, 1, 2]
        assert summed == 6
        assert mine == rank + 1  # the argument is left as it was
        assert turns == [f"rank {rank}"]


def test_collectives_alone() -> None:
    assert gather(World(), "x") == ["x"]
    assert in_turns(World(), lambda: 3) == 3


def _fail_on_one(world: World) -> tuple[str, str, int, bool]:
    try:
        with together(world):
            if world.rank == 1:
                raise DataError("pack.no-samples", split="train")
    except (DataError, PeerError) as error:
        return type(error).__name__, error.code, error.exit_code, error.is_shared
    return "", "", 0, False


def test_a_failure_of_one_rank_is_a_failure_of_all() -> None:
    first, second = spawn(_fail_on_one, 2)
    assert second == ("DataError", "pack.no-samples", 2, True)
    assert first == ("PeerError", "rank.failed", 2, True)


# --- cores ---


def _cores(
    world: World, masks: list[set[int]], pods: bool, quotas: list[dict[int, float]] | None = None
) -> tuple[int, int]:
    os.environ.pop("OMP_NUM_THREADS", None)  # of the server that ranks are forked from
    os.sched_getaffinity = lambda pid: masks[world.rank]
    if quotas:
        world_module.cpu_quotas = lambda: quotas[world.rank]  # type: ignore[attr-defined]
    if pods and world.rank > 1:  # ranks 2 and 3 are alone on another machine
        world_module.kernel = lambda boot=world_module.BOOT_ID: "another"
    world = with_cores(world)
    pick_device(world)
    return cores_per_rank(world), torch.get_num_threads()


@pytest.mark.parametrize(
    ("masks", "wanted"),
    [
        ([[0, 12], [12, 24], [24, 36], [36, 48]], [12, 12, 12, 12]),  # bound to cores
        ([[0, 48], [0, 48], [0, 48], [0, 48]], [12, 12, 12, 12]),  # not bound
        ([[0, 24], [0, 24], [24, 48], [24, 48]], [12, 12, 12, 12]),  # bound to sockets
        ([[0, 8], [0, 8], [0, 8], [8, 16]], [2, 2, 2, 8]),
        ([[0, 1], [0, 1], [0, 1], [0, 1]], [1, 1, 1, 1]),
    ],
)
def test_ranks_share_the_cores_that_they_have_in_common(
    masks: list[list[int]], wanted: list[int]
) -> None:
    """Ranks with 12 cores of their own had one thread each: their share of those, as if shared."""
    found = spawn(_cores, 4, [set(range(*mask)) for mask in masks], False)
    assert found == [(cores, cores) for cores in wanted]


@pytest.mark.parametrize(
    ("quotas", "wanted"),
    [
        ([{1: 8.0}] * 4, [2] * 4),  # one container
        ([{rank: 4.5, 9: 32.0} for rank in range(4)], [4] * 4),  # one each, in one pod
        ([{rank: 20.0, 9: 32.0} for rank in range(4)], [8] * 4),
        ([{1: 64.0}, {1: 64.0}, {}, {2: 0.5}], [16, 16, 16, 1]),
    ],
)
def test_ranks_share_the_quota_of_their_container(
    quotas: list[dict[int, float]], wanted: list[int]
) -> None:
    """4 CPUs of 64 had 64 threads, and were held up in every period."""
    found = spawn(_cores, 4, [{*range(64)}] * 4, False, quotas)
    assert found == [(cores, cores) for cores in wanted]


@pytest.mark.parametrize(
    ("quotas", "wanted"), [({}, 64), ({1: 4.0, 2: 8.0}, 4), ({1: 2.5}, 2), ({1: 0.5}, 1)]
)
def test_a_process_uses_the_quota_of_its_container(
    quotas: dict[int, float], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(world_module, "cpu_quotas", lambda: quotas)
    assert world_module.usable_cores() == wanted
    assert cores_per_rank(World()) == wanted


def test_ranks_of_other_hosts_have_other_cores() -> None:
    assert spawn(_cores, 4, [{*range(8)}] * 4, True) == [(4, 4)] * 4


_ASK = "from trainyard import world; print(world.are_threads_set())"
# torchrun sets the variable, then starts a rank.
_TORCHRUN = """
import os, subprocess, sys
os.environ["TORCHELASTIC_RUN_ID"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""


@pytest.mark.parametrize("words", [(_ASK,), (_TORCHRUN, _ASK)], ids=["alone", "torchrun"])
@pytest.mark.parametrize(("number", "is_set"), [("2", True), ("1", True), ("", False)])
def test_a_default_of_torchrun_is_no_wish(
    words: tuple[str, ...], number: str, is_set: bool
) -> None:
    env = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"OMP_NUM_THREADS": number} if number else {}
    done = subprocess.run([sys.executable, "-c", *words], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == f"{is_set}", done.stderr


def test_the_threads_that_the_user_sets_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_NUM_THREADS had no effect: each rank had as many threads as cores."""
    pretend(monkeypatch, 0)
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        pick_device(World(cores=before + 1))
        monkeypatch.setenv("OMP_NUM_THREADS", f"{before + 1}")
        pick_device(World(cores=before + 2))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


# --- devices ---


@pytest.mark.parametrize(("local_rank", "num_gpus", "index"), [(0, 1, 0), (3, 8, 3), (3, 1, 0)])
def test_a_rank_takes_the_gpu_of_its_number_of_those_it_sees(
    local_rank: int, num_gpus: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, num_gpus)
    world = World(rank=13, size=16, local_rank=local_rank, local_size=4, node=3, num_nodes=4)
    assert own_device(world) == pick_device(world) == torch.device("cuda", index)
    assert torch.cuda.current_device() == index


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0)
    assert own_device(World(rank=1, size=2, local_rank=1, local_size=2)).type == "cpu"


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ([("a", None), ("a", None), ("b", None)], None),
        ([("a", "1"), ("a", "2"), ("b", "3")], None),
        ([("a", "1"), ("b", "2"), ("b", "2")], ("rank.shared-gpu", 1, 2)),
        ([("a", "1"), ("b", None), ("b", None)], ("rank.no-gpu", 1, 0)),
        ([("a", None), ("b", "1"), ("b", "1")], ("rank.no-gpu", 0, 1)),
    ],
)
def test_each_rank_has_a_gpu_of_its_own_or_none_has_one(
    found: list[tuple[str, str | None]],
    wanted: tuple[str, int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world_module, "gather", lambda world, mine: found)
    world = World(size=len(found))
    if wanted is None:
        check_devices(world, torch.device("cpu"))
        return
    code, rank, other = wanted
    with raises(code, rank=rank, other=other) as error:
        check_devices(world, torch.device("cpu"))
    assert error.value.is_shared


# --- groups ---


@pytest.fixture
def everyone() -> Iterator[dist.ProcessGroup]:
    """A group of all ranks, of which there is one, with the limit that ranks of a run have."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # torch 2.11 has only the private name.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(LIMIT, dist.group.WORLD)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.group.WORLD.bound_device_id = None
    dist.destroy_process_group()


def limit_of(group: Any) -> timedelta:
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


def test_all_groups_have_the_limit_of_the_group_of_all_ranks(everyone: dist.ProcessGroup) -> None:
    assert limit_of(everyone) == LIMIT
    assert limit_of(new_group([0])) == LIMIT
    with StopSignal(World(size=2)) as stop:
        assert limit_of(stop._group) == LIMIT


def test_a_group_of_some_is_bound_to_the_ranks_gpu_and_no_other_rank_takes_part(
    everyone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split of NCCL's communicator of all ranks would wait for every rank."""
    device, made = torch.device("cuda", 5), []

    def note(ranks: Any, **options: Any) -> dist.ProcessGroup:
        made.append((ranks, options["device_id"], everyone.bound_device_id))
        return everyone

    everyone.bound_device_id = device
    monkeypatch.setattr(dist, "new_group", note)
    new_group([0])
    assert made == [([0], device, None)]
    assert everyone.bound_device_id == device
