"""To which GPU NCCL is bound, under every launcher; GPUs and the other ranks are not there."""

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.gpus import pretend
from trainyard.distributed import discover, process_group
from trainyard.distributed.startup_check import Start
from trainyard.world import World

Env = Mapping[str, str]


class Asked(Exception):
    """What torch was asked for, in place of a group."""


def group_of(
    env: Env, monkeypatch: pytest.MonkeyPatch, *, num_gpus: int, others: Mapping[int, str]
) -> dict[str, Any]:
    """What a rank asks torch for; `others`: the GPU of each other rank ("": none)."""
    pretend(monkeypatch, num_gpus)
    monkeypatch.setenv("MASTER_ADDR", "a")
    world, store = discover(env), dist.HashStore()
    for rank, gpu in others.items():
        store.set(f"group/gpu/{rank}", gpu)
    if not world.is_first:  # which says it
        store.set("group/each has a GPU", f"{len({*others.values()} - {''}) == len(others)}")

    def init(backend: str, **options: Any) -> None:
        raise Asked({"backend": backend} | options)

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(process_group, "open_stores", lambda *_: (store, store))
    monkeypatch.setattr(process_group, "check_start", lambda *_, **__: Start("127.0.0.1", {}))
    monkeypatch.setattr(process_group, "use_interface_to", lambda address: None)
    monkeypatch.setattr(
        process_group, "Watchdog", lambda *_, **__: SimpleNamespace(attributing_errors=nullcontext)
    )
    with pytest.raises(Asked) as asked:
        process_group._join(world, {})
    found: dict[str, Any] = asked.value.args[0]
    return found


def all_but(rank: int, size: int) -> dict[int, str]:
    return {other: f"GPU-of-{other}" for other in range(size) if other != rank}


def torchrun(rank: int, local_rank: int, node: int) -> Env:
    values = (rank, 16, local_rank, 8, node, 2)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return dict(zip((*names, "GROUP_WORLD_SIZE"), map(str, values), strict=True))


def slurm(rank: int, local_rank: int, node: int) -> Env:
    return {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_GTIDS": "0,1,2,3" if node == 0 else "4,5,6,7",
        "SLURM_PROCID": f"{rank}",
        "SLURM_LOCALID": f"{local_rank}",
        "SLURM_NODEID": f"{node}",
    }


def mpi(rank: int, local_rank: int) -> Env:
    return {
        "OMPI_COMM_WORLD_RANK": f"{rank}",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{local_rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }


def agent(rank: int, local_rank: int) -> Env:
    """That of ssh's and Ray's hosts."""
    place = {"RANK": rank, "WORLD_SIZE": 8, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 4}
    place |= {"GROUP_RANK": rank // 4, "GROUP_WORLD_SIZE": 2, "MASTER_PORT": 29500}
    return {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "a"}


@pytest.mark.parametrize(
    ("env", "num_gpus", "index"),
    [
        pytest.param(torchrun(3, 3, 0), 8, 3, id="torchrun"),
        pytest.param(torchrun(11, 3, 1), 8, 3, id="torchrun, second node"),
        pytest.param(slurm(5, 1, 1), 8, 1, id="Slurm, block"),
        pytest.param(slurm(5, 2, 1), 8, 2, id="Slurm, cyclic"),
        pytest.param(slurm(5, 1, 1), 1, 0, id="Slurm, each task sees its own GPU"),
        pytest.param(mpi(4, 0), 8, 0, id="mpi, 4 of 8 GPUs"),
        pytest.param(mpi(7, 3), 8, 3, id="mpi, 4 of 8 GPUs, last rank"),
        pytest.param(agent(6, 2), 4, 2, id="ssh and Ray"),
    ],
)
def test_nccl_is_bound_to_the_ranks_own_gpu(
    env: Env, num_gpus: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = discover(env)
    others = all_but(world.rank, world.size)
    asked = group_of(env, monkeypatch, num_gpus=num_gpus, others=others)
    assert asked["device_id"] == torch.device("cuda", index)
    assert torch.cuda.current_device() == index
    assert (asked["backend"], asked["rank"]) == ("cpu:gloo,cuda:nccl", world.rank)


def test_ranks_of_one_host_that_each_see_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by CUDA_VISIBLE_DEVICES: both take the first GPU that they see, which is another one."""
    env = {**mpi(0, 0), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    asked = group_of(env, monkeypatch, num_gpus=1, others={1: "GPU-1"})
    assert (asked["backend"], asked["device_id"]) == ("cpu:gloo,cuda:nccl", torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("num_gpus", "others"),
    [
        pytest.param(1, {1: "GPU-0"}, id="two ranks, one GPU"),
        pytest.param(1, {1: ""}, id="one sees none"),
        pytest.param(0, {1: "GPU-0"}, id="the first sees none"),
        pytest.param(0, {1: ""}, id="no GPUs"),
    ],
)
def test_without_a_gpu_for_each_there_is_no_nccl(
    num_gpus: int, others: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can talk, and `check_devices` says what is wrong."""
    env = {**mpi(0, 0), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    asked = group_of(env, monkeypatch, num_gpus=num_gpus, others=others)
    assert (asked["backend"], asked["device_id"]) == ("gloo", None)
    assert discover(env) == World(rank=0, size=2, local_size=2)
