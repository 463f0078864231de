"""`launch ray` on a real cluster of two nodes."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.errors import check, refused
from tests.services.losses import SAME, Losses, has_gone_on, losses_of, reports
from tests.services.ray_cluster import RayNodes, ray_nodes
from tests.test_cli_signals import LONG, check_stopped_run, has_saved, started, wait_for
from tests.tiers import tiered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # starts beside others take minutes

pytest.importorskip("ray", reason="needs Ray: make .venv/.dev")
PATIENCE_S = 300
SUSPENDED_S = 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    """Its head, at 127.0.0.1."""
    with ray_nodes() as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def _its_environment(cluster: RayNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def second(cluster: RayNodes) -> Iterator[str]:
    """The address of another node."""
    address = "127.0.0.2"
    if not cluster.members(address):
        cluster.add(2)
    yield address


def test_same_losses_as_without_ray(
    cluster: RayNodes, second: str, digits: Path, tmp_path: Path, local_losses: Losses
) -> None:
    """Ray's own lines are on stderr, so programs read those of the run."""
    folder = tmp_path / "run"
    words = ("--nodes", 2, "--ranks", 1, "--data", digits, "--run", folder, *SAME, "--json")
    with started(tmp_path, "launch", "ray", "debug", *words) as command:
        out, err = command.process.communicate(timeout=PATIENCE_S)
        assert (command.process.returncode, command.members()) == (0, []), err
    assert losses_of(folder) == local_losses
    assert json.loads(out)["step"] == max(local_losses)
    wait_for(lambda: not cluster.ours(), "the workers to end", PATIENCE_S)


@pytest.mark.night
@pytest.mark.parametrize(
    ("number", "code"),
    tiered([(signal.SIGINT, 130), (signal.SIGUSR1, 75)], night=[(signal.SIGINT, 130)]),
)
def test_a_rank_that_is_killed_starts_again(
    number: signal.Signals, code: int, cluster: RayNodes, second: str, digits: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = ("--nodes", 2, "--ranks", 1, "--restarts", 1, "--data", digits, "--run", folder)
    with started(tmp_path, "launch", "ray", "debug", *words, *LONG) as command:
        wait_for(lambda: has_saved(folder), "the first checkpoint", PATIENCE_S)
        os.kill(cluster.ranks(second)[0], signal.SIGKILL)
        killed_at = time.monotonic()
        wait_for(lambda: has_gone_on(folder), "the run to go on", PATIENCE_S)
        print(f"{time.monotonic() - killed_at:.1f} s from the death of a rank to the next step")
        command.process.send_signal(number)
        out, err = command.process.communicate(timeout=PATIENCE_S)
        assert (command.process.returncode, command.members()) == (code, []), err
    check_stopped_run(folder)
    assert re.search(r"\(RayTrainWorker pid=.*rank \d was killed by signal 9", out + err)
    wait_for(lambda: not cluster.ours(), "the workers to end", PATIENCE_S)


@pytest.mark.night
@pytest.mark.parametrize(("what", "code"), [("rank", 128 + signal.SIGKILL), ("node", 1)])
def test_a_death_ends_the_run_without_restarts(
    what: str, code: int, cluster: RayNodes, second: str, digits: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = ("--nodes", 2, "--ranks", 2, "--data", digits, "--run", folder)
    with started(tmp_path, "launch", "ray", "debug", *words, *LONG) as command:
        wait_for(lambda: has_saved(folder), "the first checkpoint", PATIENCE_S)
        if what == "rank":
            os.kill(cluster.ranks(second)[0], signal.SIGKILL)
        else:
            cluster.kill(second)
        _, err = command.process.communicate(timeout=PATIENCE_S)
    assert command.process.returncode == code, err
    assert "trainyard: no restart is left: " in err


@pytest.mark.night
def test_a_mistake_is_not_tried_again(cluster: RayNodes, second: str, tmp_path: Path) -> None:
    where = ("--data", tmp_path, "--run", tmp_path / "run")
    words = ("--nodes", 2, "--ranks", 1, "--restarts", 3, *where)
    with started(tmp_path, "launch", "ray", "debug", *words) as command:
        out, err = command.process.communicate(timeout=PATIENCE_S)
    assert command.process.returncode == 2
    assert len(re.findall(r"Started training worker group", out + err)) == 1
    assert re.search(rf"\(RayTrainWorker pid=.*trainyard: .*{tmp_path}", out + err)


@pytest.mark.night
def test_what_ray_does_not_have(cluster: RayNodes, tmp_path: Path) -> None:
    with started(tmp_path, "launch", "ray", "debug", "--gpus", 8) as command:
        out, err = command.process.communicate(timeout=PATIENCE_S)
    assert (command.process.returncode, out, err.count("\n")) == (2, "", 1)
    assert "1 x (8 CPUs, 8 GPUs) are asked for, and Ray has nodes with " in err
    assert "x (2 CPUs, 0 GPUs): 1 missing" in err

    words = ("launch", "ray", "debug", "--ranks", 1, "--address", "127.0.0.1:1")
    check(refused(*words), "launch.ray-unreachable", address="127.0.0.1:1")


@pytest.mark.night
def test_the_run_goes_on_without_a_node_that_dies(
    cluster: RayNodes, second: str, digits: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = ("--nodes", 2, "--ranks", 2, "--min-nodes", 1, "--restarts", 1, "--data", digits)
    with started(tmp_path, "launch", "ray", "debug", *words, "--run", folder, *LONG) as command:
        wait_for(lambda: has_saved(folder), "the first checkpoint", PATIENCE_S)
        cluster.kill(second)
        killed_at = time.monotonic()
        wait_for(lambda: has_gone_on(folder), "the run to go on", PATIENCE_S)
        print(f"{time.monotonic() - killed_at:.1f} s from the death of a node to the next step")
        command.process.send_signal(signal.SIGINT)
        _, err = command.process.communicate(timeout=PATIENCE_S)
        assert (command.process.returncode, command.members()) == (130, []), err
    check_stopped_run(folder)
    wait_for(lambda: not cluster.ours(), "the workers to end", PATIENCE_S)


@pytest.mark.night
def test_a_node_that_is_drained_loses_nothing(
    cluster: RayNodes, second: str, digits: Path, tmp_path: Path
) -> None:
    """Nor is a restart counted."""
    folder = tmp_path / "run"
    words = ("--nodes", 2, "--ranks", 1, "--min-nodes", 1, "--data", digits, "--run", folder)
    with started(tmp_path, "launch", "ray", "debug", *words, *LONG) as command:
        wait_for(lambda: has_saved(folder), "the first checkpoint", PATIENCE_S)
        cluster.drain(second, 30)
        drained_at = time.monotonic()
        wait_for(lambda: not cluster.ranks(second), "the ranks to save", PATIENCE_S)
        print(f"{time.monotonic() - drained_at:.1f} s from the notice to the checkpoint")
        check_stopped_run(folder)
        step = max(losses_of(folder))
        wait_for(lambda: has_gone_on(folder), "the run to go on", PATIENCE_S)
        print(f"{time.monotonic() - drained_at:.1f} s from the notice to the next step")
        assert step + 1 in losses_of(folder)
        resumed = [line for line in reports(folder) if line.get("event") == "resumed"]
        assert [line["step"] for line in resumed] == [step]
        command.process.send_signal(signal.SIGTERM)
        _, err = command.process.communicate(timeout=PATIENCE_S)
        assert command.process.returncode == 130, err
    cluster.kill(second)


@pytest.mark.night
def test_the_run_goes_on_with_another_node(
    cluster: RayNodes, second: str, digits: Path, tmp_path: Path
) -> None:
    """And then its launcher is suspended, and killed."""
    folder = tmp_path / "run"
    words = ("--nodes", 2, "--ranks", 2, "--restarts", 1, "--data", digits, "--run", folder)
    with started(tmp_path, "launch", "ray", "debug", *words, *LONG) as command:
        wait_for(lambda: has_saved(folder), "the first checkpoint", PATIENCE_S)
        cluster.kill(second)
        third = cluster.add(3)
        killed_at = time.monotonic()
        wait_for(lambda: has_gone_on(folder), "the run to go on", PATIENCE_S)
        print(f"{time.monotonic() - killed_at:.1f} s from a new node to the next step")
        assert len(cluster.ranks(third)) == 2
        command.process.send_signal(signal.SIGSTOP)
        time.sleep(SUSPENDED_S)
        step = max(losses_of(folder))
        wait_for(lambda: max(losses_of(folder)) > step, "a step meanwhile")
        command.process.send_signal(signal.SIGCONT)
        assert has_gone_on(folder)
        command.process.kill()
        command.process.communicate()
        killed_at = time.monotonic()
        wait_for(lambda: not (command.members() or cluster.ours()), "all to end", PATIENCE_S)
        print(f"{time.monotonic() - killed_at:.1f} s from the launcher's death to the end")
    check_stopped_run(folder)
    cluster.kill(third)
