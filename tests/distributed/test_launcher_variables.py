"""Who a process is, by the environments that starters really make."""

from itertools import compress, product

import pytest

from tests.errors import raises
from trainyard.distributed.launcher_variables import (
    STARTERS,
    MeetingPoint,
    discover,
    first_host,
    meeting_point,
)
from trainyard.errors import InputError
from trainyard.world import World

Env = dict[str, str]


def env(text: str) -> Env:
    return dict(pair.split("=", 1) for pair in text.split())


# As Slurm 22.05 and OpenMPI 4.1 set them; what says nothing of places is left out.
JOB = env(
    """
    SLURM_JOB_ID=17 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=3
    SLURM_NPROCS=3 SLURM_NNODES=2 SLURM_TASKS_PER_NODE=2,1
    """
)
BATCH_SHELL = JOB | env(
    """
    SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_GTIDS=0
    """
)
TASK = JOB | env(
    """
    SLURM_STEP_ID=4 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3
    SLURM_NODEID=0 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_GTIDS=0,1
    """
)
LAST_TASK = TASK | env(
    """
    SLURM_NODEID=1 SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_GTIDS=2
    """
)
INTERACTIVE_STEP = TASK | env(
    """
    SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0
    SLURM_LOCALID=0 SLURM_GTIDS=0
    """
)
MPIRUN = env(
    """
    OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1
    OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_MCA_orte_num_nodes=1
    PMIX_NAMESPACE=364904449 PMIX_RANK=1
    """
)
# Inside sbatch the ranks of the other hosts are started by a daemon that is a task itself.
DAEMONS_STEP = env(
    """
    SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2
    SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0
    """
)
HYDRA = env(
    """
    PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2
    """
)
PMI2 = env(
    """
    PMI_FD=11 PMI_JOBID=17.4 PMI_RANK=1 PMI_SIZE=3
    """
)
TORCHRUN = env(
    """
    RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2
    MASTER_ADDR=a.lan MASTER_PORT=34567 TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0
    TORCHELASTIC_USE_AGENT_STORE=True
    """
)
RAY_TRAIN = env(
    """
    RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 NODE_RANK=1 MASTER_ADDR=192.0.2.2
    MASTER_PORT=41000
    """
)
PYTORCHJOB = env(
    """
    RANK=1 WORLD_SIZE=3 MASTER_ADDR=job-master-0 MASTER_PORT=23456 PET_NNODES=3
    """
)
SUBMITIT_LOCAL = env(
    """
    SUBMITIT_EXECUTOR=local SUBMITIT_LOCAL_JOB_ID=812 SUBMITIT_LOCAL_NTASKS=2
    SUBMITIT_LOCAL_GLOBALID=1 SUBMITIT_LOCAL_LOCALID=1 SUBMITIT_LOCAL_NODEID=0
    SUBMITIT_LOCAL_JOB_NUM_NODES=1
    """
)


def world(rank: int, size: int, local: str, nodes: str) -> World:
    """world(5, 8, "1/4", "1/2")"""
    local_rank, local_size = map(int, local.split("/"))
    node, num_nodes = map(int, nodes.split("/"))
    return World(rank, size, local_rank, local_size, node, num_nodes)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, World(), id="nothing"),
        pytest.param(TORCHRUN, world(5, 8, "1/4", "1/2"), id="torchrun"),
        pytest.param(RAY_TRAIN, world(3, 4, "1/2", "1/2"), id="Ray Train"),
        pytest.param(PYTORCHJOB, world(1, 3, "0/1", "1/3"), id="PyTorchJob"),
        pytest.param(MPIRUN, world(1, 2, "1/2", "0/1"), id="mpirun"),
        pytest.param(HYDRA, world(3, 4, "1/2", "1/2"), id="MPICH"),
        pytest.param(SUBMITIT_LOCAL, world(1, 2, "1/2", "0/1"), id="submitit, local"),
        pytest.param(TASK, world(1, 3, "1/2", "0/2"), id="srun"),
        pytest.param(LAST_TASK, world(2, 3, "0/1", "1/2"), id="srun, the last node"),
        pytest.param(TASK | PMI2, world(1, 3, "1/2", "0/2"), id="srun --mpi=pmi2"),
        pytest.param(BATCH_SHELL, World(), id="a batch script"),
        pytest.param(JOB, World(), id="the shell of salloc"),
        pytest.param(INTERACTIVE_STEP, World(), id="srun --pty bash"),
        pytest.param(BATCH_SHELL | TORCHRUN, world(5, 8, "1/4", "1/2"), id="torchrun in sbatch"),
        pytest.param(LAST_TASK | TORCHRUN, world(5, 8, "1/4", "1/2"), id="torchrun in srun"),
        pytest.param(BATCH_SHELL | MPIRUN, world(1, 2, "1/2", "0/1"), id="mpirun in sbatch"),
        pytest.param(
            BATCH_SHELL | DAEMONS_STEP | MPIRUN, world(1, 2, "1/2", "0/1"), id="mpirun by daemons"
        ),
        pytest.param(DAEMONS_STEP | HYDRA, world(3, 4, "1/2", "1/2"), id="MPICH in sbatch"),
        pytest.param(LAST_TASK | RAY_TRAIN, world(3, 4, "1/2", "1/2"), id="Ray in srun"),
        pytest.param(TASK | {"WORLD_SIZE": "3"}, world(1, 3, "1/2", "0/2"), id="equal size"),
        pytest.param(
            TASK | {"WORLD_SIZE": "3", "RANK": "1", "LOCAL_RANK": "1"},
            world(1, 3, "1/2", "0/2"),
            id="set in each task",
        ),
        pytest.param(
            INTERACTIVE_STEP | {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1"},
            world(1, 2, "1/2", "0/1"),
            id="by hand in a shell of Slurm's",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
            world(1, 2, "1/2", "0/1"),
            id="by hand on one machine",
        ),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, World(), id="one rank"),
        pytest.param(
            TASK | {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"},
            world(2, 4, "2/4", "0/1"),
            id="by hand, unlike Slurm",
        ),
        pytest.param(TASK | {"WORLD_SIZE": "4"}, world(1, 3, "1/2", "0/2"), id="half by hand"),
    ],
)
def test_the_world_that_a_starter_describes(env: Env, expected: World) -> None:
    assert discover(env) == expected


@pytest.mark.parametrize(
    ("env", "variable", "given"),
    [
        ({"RANK": "0"}, "WORLD_SIZE", "RANK"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK", "WORLD_SIZE, LOCAL_RANK"),
        (BATCH_SHELL | {"WORLD_SIZE": "2"}, "RANK", "WORLD_SIZE"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
            "LOCAL_WORLD_SIZE",
            "RANK, WORLD_SIZE, LOCAL_RANK",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ({"PMI_RANK": "0"}, "PMI_SIZE", "PMI_RANK"),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "1"},
            "SLURM_GTIDS",
            "SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID",
        ),
    ],
)
def test_what_is_missing_is_named(env: Env, variable: str, given: str) -> None:
    with raises("rank.variable-missing", variable=variable, given=given):
        discover(env)


@pytest.mark.parametrize("env", [TASK, TASK | PMI2, SUBMITIT_LOCAL, MPIRUN, TORCHRUN])
def test_any_part_of_an_environment_is_a_world_or_what_is_missing_is_named(env: Env) -> None:
    """Containers pass on some variables. SLURM_LOCALID without SLURM_GTIDS was a KeyError."""
    codes = set()
    read = {name for starter in STARTERS for name in starter.variables.values()} & env.keys()
    for kept in product((False, True), repeat=len(read)):
        part = {name: env[name] for name in compress(sorted(read), kept)}
        try:
            found = discover(part)
        except InputError as error:
            codes.add(error.code)
        else:
            assert found.local_rank < found.local_size
            assert found.node < found.num_nodes
    assert codes == {"rank.variable-missing"}


def test_a_rank_that_is_none_is_named() -> None:
    with raises("variable.not-a-number", name="RANK", value="zero"):
        discover({"RANK": "zero", "WORLD_SIZE": "2"})
    with raises("rank.beyond-size", variable="RANK", rank=2, size_variable="WORLD_SIZE", size=2):
        discover({"RANK": "2", "WORLD_SIZE": "2"})


# --- where they meet ---


def meet(env: Env) -> MeetingPoint:
    return meeting_point(discover(env), env)


def test_the_address_that_a_launcher_tells() -> None:
    assert meet(TORCHRUN) == MeetingPoint("a.lan", 34567, is_hosted=True, job="none")
    assert meet(PYTORCHJOB) == MeetingPoint("job-master-0", 23456)
    assert meet(TORCHRUN | {"MASTER_ADDR": "[::1]"}).host == "::1"
    assert str(meet(TORCHRUN | {"MASTER_ADDR": "::1"})) == "[::1]:34567"


def test_the_first_host_of_a_step_and_a_port_of_its_own() -> None:
    point = meet(TASK)
    assert (point.host, point.job) == ("n1", "17.4")
    assert 15_000 <= point.port < 30_000
    assert meet(LAST_TASK) == point
    assert meet(TASK | {"SLURM_STEP_ID": "5"}).port != point.port
    assert meet(TASK | {"MASTER_PORT": "1234"}) == MeetingPoint("n1", 1234, job="17.4")
    assert meet(TASK | {"MASTER_ADDR": "x"}) == MeetingPoint("x", point.port, job="17.4")


def test_on_one_node_they_meet_inside_of_it() -> None:
    one_node = {"SLURM_STEP_NUM_NODES": "1", "SLURM_GTIDS": "0,1,2"}
    for env in (TASK | one_node, MPIRUN, SUBMITIT_LOCAL):
        assert meet(env).host == "127.0.0.1"
    assert meet(MPIRUN).port != meet(MPIRUN | {"PMIX_NAMESPACE": "364904450"}).port
    assert meet({**HYDRA, "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}).port == 29_500


def test_where_nothing_tells_it_says_what_to_do() -> None:
    spread = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    for env in (MPIRUN | spread, HYDRA, {"RANK": "1", "WORLD_SIZE": "2"}):
        with raises("rank.no-master-addr"):
            meet(env)
    assert meet(MPIRUN | spread | JOB).host == "n1"
    with raises("rank.malformed-port", value=70000):
        meet(TORCHRUN | {"MASTER_PORT": "70000"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("", ""),
        ("n1", "n1"),
        ("n[1-3]", "n1"),
        ("n[05,07],lab3", "n05"),
        ("lab[01,03]-ib,n2", "lab01-ib"),
        ("r[1-2]n[08-10]", "r1n08"),
        ("a.lan,b-2.lan", "a.lan"),
        ("10.0.0.[9-11]", "10.0.0.9"),
    ],
)
def test_the_first_of_a_list_of_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_a_last_node_with_fewer_ranks_is_a_node() -> None:
    uneven = MPIRUN | env("OMPI_COMM_WORLD_SIZE=3 SLURM_JOB_NODELIST=n[1-2]")
    assert discover(uneven) == world(1, 3, "1/2", "0/2")
    assert meet(uneven).host == "n1"
