"""`launch ray`: what is refused before Ray is asked for anything."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.command_line import Capture, complaint, run
from trainyard.launch.ray import why_lost

LAUNCH = ("launch", "ray", "debug")


def test_dry_run(capfd: Capture) -> None:
    assert run(*LAUNCH, "--nodes", 2, "--gpus", 4, "--run", "runs/here", "--dry-run") == 0
    assert capfd.readouterr().out == (
        f"2 x a node of Ray: 4 x {sys.executable} -P -m trainyard train debug --run runs/here\n"
    )


def test_without_ray(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "this needs Ray: pip install 'trainyard-images[ray]'" in complaint(capsys, *LAUNCH)


def test_a_ray_that_was_asked_for_is_not_replaced(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(*_: object, **__: object) -> None:
        raise ConnectionError("no running Ray")

    ray = SimpleNamespace(init=init, shutdown=lambda: None, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert "Ray at auto: no running Ray" in complaint(capsys, *LAUNCH, "--address", "auto")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "Ray at auto: no running Ray" in complaint(capsys, *LAUNCH)


def test_mistakes(capsys: Capture, tmp_path: Path) -> None:
    assert "where the working directory is a copy" in complaint(
        capsys, *LAUNCH, "--working-dir", "."
    )
    environment = tmp_path / "environment.yaml"
    assert f"{environment}: No such file" in complaint(
        capsys, *LAUNCH, "--runtime-env", environment
    )
    environment.write_text("- pip\n")
    assert "is no mapping" in complaint(capsys, *LAUNCH, "--runtime-env", environment)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n"
            "The actor died because its node has died. Node Id: 1a2b\n",
            "its node has died",
        ),
        (
            "The actor died because of an error raised in its creation task, ray::Node.__init__()\n"
            "  File 'ray_node.py', line 40, in __init__\n"
            "FileNotFoundError: [Errno 2] No such file or directory: '/work'\n",
            "FileNotFoundError: [Errno 2] No such file or directory: '/work'",
        ),
    ],
)
def test_what_ray_says_of_a_loss(text: str, why: str) -> None:
    assert why_lost(RuntimeError(text)) == why
