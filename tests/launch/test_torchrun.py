"""`train` under the user's own torchrun: a rank, an agent, or torchrun itself is ended."""

import json
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import newest, run
from tests.runs import curve
from tests.test_cli_signals import Started, check_stopped_run, has_begun, under_way, wait_for
from tests.web import free_port
from trainyard.data.sampler.plan import ShuffledPlan
from trainyard.training.checkpoint import find_problem

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
NUM_STEPS, BATCH = 40, 64
KILLED = 30  # the step, counted from 0, in which a rank is killed
SAVED = 12  # steps between two checkpoints
BACK = KILLED // SAVED * SAVED  # where the run goes on
OPTIONS = (
    *("--run.length", f"{NUM_STEPS} steps", "--batch.size", BATCH, "--run.log_every", "1 step"),
    *("--run.save_every", f"{SAVED} steps", "--run.eval_every", "0 steps", "--data.threads", 1),
)
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
# An agent that is gone is missed after 3 s, and newcomers are waited for so long; torch: 30 s.
TIMES = "join_timeout=60,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"


def test_train_under_torchrun(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--"]
    command += ["trainyard", "train", "debug", "--data", str(digits), "--run", str(folder)]
    command += ["--run.length", "2 steps", "--run.log_every", "1 step"]

    subprocess.run(command, check=True, timeout=200, capture_output=True, cwd=tmp_path)

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
    (val,) = [line for line in lines if line["kind"] == "val"]
    assert val["evaluated"] == 364
    page = (ROOT / "docs" / "launching.md").read_text()
    assert "    torchrun --nproc-per-node 8 -m -- trainyard train" in page


# --- runs that something happens to ---


def torchrun(
    where: Path, digits: Path, *options: str, **variables: object
) -> AbstractContextManager[Started]:
    """A torchrun of ranks that note their steps under `where`; nothing of it is left."""
    (where / "notes").mkdir(exist_ok=True)
    words = ["train", "debug", "--data", digits, "--run", where / "run", *OPTIONS]
    variables |= {"NOTES": where / "notes", "OMP_NUM_THREADS": 1}
    agent = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", *options]
    return under_way(
        str(where),
        [*agent, "-m", "--", "tests.launch.noting", *map(str, words)],
        {key: str(value) for key, value in variables.items()},
        stderr=subprocess.STDOUT,
        cwd=ROOT,
    )


Start = dict[int, dict[int, list[int]]]
"""The samples that each rank of one start noted, by step."""


def starts(where: Path) -> list[Start]:
    """One after another: old ranks are ended before new ones begin."""
    found: list[Start] = []
    files = sorted((where / "notes").iterdir())
    while files:
        notes = [json.loads(line) for line in files[0].read_text().splitlines()]
        size = notes[0][2]
        start: Start = {}
        for file in files[:size]:
            for line in file.read_text().splitlines():
                step, rank, _, ids = json.loads(line)
                start.setdefault(step, {})[rank] = ids
        found.append(start)
        files = files[size:]
    return found


def check_stream(where: Path, sizes: list[int]) -> list[int]:
    """Every step's batch is that of the plan, however many ranks shared it; the first steps."""
    found = starts(where)
    assert [len(next(iter(start.values()))) for start in found] == sizes
    firsts = [min(start) for start in found]
    plan = ShuffledPlan(1433, BATCH, seed=0)
    for start, first, end in zip(found, firsts, [*firsts[1:], NUM_STEPS], strict=True):
        for step in range(first, end):
            batch = np.zeros(BATCH, int)
            for rank, ids in start[step].items():
                batch[rank :: len(start[step])] = ids
            assert batch.tolist() == plan.batch(step).tolist()
    assert firsts[0] == 0
    return firsts


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run("train", "debug", "--data", digits, "--run", folder, *OPTIONS, "--json") == 0
    return folder


def check_end(where: Path, undisturbed: Path) -> None:
    """The same losses and evaluation as those of a run that nothing happened to."""
    for kind in ("train", "val"):
        ours, theirs = (curve(folder, kind, "loss") for folder in (where / "run", undisturbed))
        assert theirs.keys() == ours.keys()
        for step, (loss,) in ours.items():
            assert loss == pytest.approx(theirs[step][0], rel=1e-4)
    assert newest(where / "run").name == f"step-{NUM_STEPS:08d}"
    assert find_problem(newest(where / "run")) is None


def output(command: Started, code: int = 0) -> str:
    """What a torchrun that ends has said."""
    out, _ = command.process.communicate(timeout=250)
    assert command.process.returncode == code, out
    return out


def node(port: int, *, is_host: bool, nodes: str = "1:2") -> tuple[str, ...]:
    """The options of one agent of several, of which the host keeps the store where they meet."""
    return (
        *("--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"),
        *("--rdzv-conf", f"{TIMES},is_host={int(is_host)}", "--local-addr", "127.0.0.1"),
    )


OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}


@pytest.mark.night
def test_a_node_joins_and_vanishes(digits: Path, undisturbed: Path, tmp_path: Path) -> None:
    port = free_port()
    with torchrun(tmp_path, digits, *node(port, is_host=True), **OWN_STORE, STEP_S=1) as host:
        wait_for(lambda: has_begun(tmp_path / "run"), "the first report", 200)
        dies = {"DIE_AT": KILLED, "DIE_AGENT": 1}
        with torchrun(tmp_path, digits, *node(port, is_host=False), **OWN_STORE, **dies) as other:
            assert other.process.wait(timeout=200) == -signal.SIGKILL
            output(host)
            assert host.members() == []
    first, joined, vanished = check_stream(tmp_path, [1, 2, 1])
    assert first < joined <= vanished == BACK
    check_end(tmp_path, undisturbed)


# --- torchrun itself is ended ---


@pytest.mark.night
def test_ranks_save_when_torchrun_is_told_to_end(digits: Path, tmp_path: Path) -> None:
    options = ("--standalone", "--nproc-per-node", "2", "--signals-to-handle", SIGNALS)
    with torchrun(tmp_path, digits, *options, STEP_S=0.1) as command:
        wait_for(lambda: has_begun(tmp_path / "run"), "the first report", 200)
        command.process.send_signal(signal.SIGUSR1)
        out = output(command, code=1)  # torchrun has no other
        assert command.members() == []
    assert out
    check_stopped_run(tmp_path / "run")


@pytest.mark.night
def test_ranks_end_with_their_torchrun(digits: Path, tmp_path: Path) -> None:
    options = ("--standalone", "--nproc-per-node", "2")
    with torchrun(tmp_path, digits, *options, STEP_S=0.1) as command:
        wait_for(lambda: has_begun(tmp_path / "run"), "the first report", 200)
        command.process.kill()
        wait_for(lambda: not command.members(), "the ranks to end", 200)
    check_stopped_run(tmp_path / "run")
