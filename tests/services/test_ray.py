"""`launch ray` on a real cluster of two nodes."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import Capture, complaint
from tests.services.losses import SAME, Losses, has_gone_on, losses_of
from tests.services.ray_cluster import RayNodes, ray_nodes
from tests.test_cli_signals import LONG, check_stopped_run, has_saved, started, wait_for

pytest.importorskip("ray", reason="needs Ray: make .venv/.dev")
PATIENCE_S = 150


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
    folder = tmp_path / "run"
    words = ("--nodes", 2, "--ranks", 1, "--data", digits, "--run", folder, *SAME)
    with started(tmp_path, "launch", "ray", "debug", *words) as command:
        out, err = command.process.communicate(timeout=PATIENCE_S)
        assert (command.process.returncode, err, command.members()) == (0, "", [])
    assert losses_of(folder) == local_losses
    # A loopback address that a node was given, or in its place, as Ray sometimes has it, another.
    assert re.match(r"\d+\.\d+\.\d+\.\d+ \| ", out)
    wait_for(lambda: not cluster.ours(), "the actors to end", PATIENCE_S)


def test_what_ray_does_not_have(capsys: Capture, cluster: RayNodes, tmp_path: Path) -> None:
    with started(tmp_path, "launch", "ray", "debug", "--gpus", 8) as command:
        out, err = command.process.communicate(timeout=PATIENCE_S)
    assert (command.process.returncode, out, err.count("\n")) == (2, "", 1)
    assert "1 x (8 CPUs, 8 GPUs) are asked for, and Ray has nodes with " in err
    assert "x (2 CPUs, 0 GPUs): 1 missing" in err

    words = ("launch", "ray", "debug", "--ranks", 1, "--address", "127.0.0.1:1")
    assert "no Ray answers at 127.0.0.1:1 (Connection refused)" in complaint(capsys, *words)


def test_the_run_goes_on_without_a_node_that_dies(
    cluster: RayNodes, second: str, digits: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = ("--nodes", 2, "--ranks", 1, "--min-nodes", 1, "--data", digits, "--run", folder)
    with started(tmp_path, "launch", "ray", "debug", *words, *LONG) as command:
        wait_for(lambda: has_saved(folder), "the first checkpoint", PATIENCE_S)
        cluster.kill(second)
        wait_for(lambda: has_gone_on(folder), "the run to go on", PATIENCE_S)
        command.process.send_signal(signal.SIGINT)
        _, err = command.process.communicate(timeout=PATIENCE_S)
        assert (command.process.returncode, command.members()) == (130, [])
    check_stopped_run(folder)
    assert f"trainyard: host {second} is gone: " in err and "going on with " in err
    assert len(re.findall(r"is gone; .*the same command resumes from step-", err)) == 1
    wait_for(lambda: not cluster.ours(), "the actors to end", PATIENCE_S)


def test_the_run_goes_on_with_another_node(
    cluster: RayNodes, second: str, digits: Path, tmp_path: Path
) -> None:
    """And then its launcher is killed."""
    folder = tmp_path / "run"
    words = ("--nodes", 2, "--ranks", 1, "--restarts", 1, "--data", digits, "--run", folder)
    with started(tmp_path, "launch", "ray", "debug", *words, *LONG) as command:
        wait_for(lambda: has_saved(folder), "the first checkpoint", PATIENCE_S)
        cluster.kill(second)
        cluster.add(3)
        wait_for(lambda: has_gone_on(folder), "the run to go on", PATIENCE_S)
        command.process.kill()
        _, err = command.process.communicate()
        wait_for(lambda: not (command.members() or cluster.ours()), "all to end", PATIENCE_S)
    assert f"trainyard: host {second} is gone: " in err and "starting again (1 of 1)" in err
    check_stopped_run(folder)
