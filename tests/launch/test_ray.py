"""`launch ray`: what is refused before Ray is asked for anything."""

import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.command_line import Capture, run
from tests.errors import check, refused
from trainyard.errors import InputError, PeerError, Requeued, TrainyardError

LAUNCH = ("launch", "ray", "debug")


def test_dry_run(capfd: Capture) -> None:
    assert run(*LAUNCH, "--nodes", 2, "--gpus", 4, "--run", "runs/here", "--dry-run") == 0
    python = shlex.quote(sys.executable)
    assert capfd.readouterr().out == (
        f"2 x a node of Ray: 4 x {python} -P -m trainyard train debug --run runs/here\n"
    )


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    check(refused(*LAUNCH), "launch.needs-ray")


def test_a_ray_that_was_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: object, **__: object) -> None:
        raise ConnectionError("no running Ray")

    ray = SimpleNamespace(init=init, shutdown=lambda: None, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    check(refused(*LAUNCH, "--address", "auto"), "launch.ray-failed", address="auto")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    check(refused(*LAUNCH), "launch.ray-failed", address="auto")


def test_mistakes(tmp_path: Path) -> None:
    check(refused(*LAUNCH, "--working-dir", "."), "launch.run-in-working-copy")
    path = tmp_path / "environment.yaml"
    check(refused(*LAUNCH, "--runtime-env", path), "launch.runtime-env-unreadable", path=path)
    path.write_text("- pip\n")
    check(refused(*LAUNCH, "--runtime-env", path), "launch.runtime-env-no-mapping", path=path)


def test_tokens_are_not_in_what_ray_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dashboard has the configuration of a training, where it follows trainings."""
    pytest.importorskip("ray.train", reason="needs Ray: make .venv/.dev")
    from trainyard.launch.job import Job
    from trainyard.launch.ray import RayOptions, _trainer

    monkeypatch.setenv("TRAINYARD_TOKENS", "host=secret")
    job = Job(("train", "debug"), tmp_path)
    trainer = _trainer(job, RayOptions(), {"CPU": 1}, board=None, folder=str(tmp_path))
    assert "secret" not in str(trainer.train_loop_config)


def test_attempts_end_with_a_mistake_or_a_signal() -> None:
    """A node that makes a mistake may be the cause that others fail."""
    pytest.importorskip("ray.train", reason="needs Ray: make .venv/.dev")
    from trainyard.launch.ray_nodes import Board

    board = Board()
    assert board.begin(2)
    board.end(0, 1)
    assert (board.is_running(), board.codes()) == (True, {0: 1})
    board.over()  # the other node is lost
    assert not board.is_running()
    assert board.begin(2)
    board.end(0, PeerError.exit_code)
    board.end(1, InputError.exit_code)
    assert not board.begin(2)

    board = Board()
    board.signal(signal.SIGTERM)
    assert not board.begin(2)


def test_a_run_that_lost_its_last_node_has_failed_though_the_others_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = (
        pytest.importorskip("ray.train", reason="needs Ray: make .venv/.dev") and sys.modules["ray"]
    )
    from trainyard.launch.ray import _await_end

    def fit() -> None:
        raise RuntimeError("a node is lost")

    monkeypatch.setattr(ray, "get", lambda value: value)
    for code, meaning in ((Requeued.exit_code, 1), (0, 1), (-signal.SIGKILL, 137)):
        codes = SimpleNamespace(remote=lambda code=code: {0: code})
        with pytest.raises(TrainyardError) as caught:
            _await_end(SimpleNamespace(fit=fit), SimpleNamespace(codes=codes), [])
        assert caught.value.exit_code == meaning
