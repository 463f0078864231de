"""How a run speaks: live or plain, of one rank or of all, or not before the end."""

import platform
import re
from pathlib import Path

import pytest

from tests.command_line import SHORT, Capture, run, shown
from trainyard.cli.train import OUTPUT_MODES

HOST = platform.node()
THERE = ("--data", "/only/there")
VOLUME = ("--image", "registry.example/trainyard:1", "--volume", "runs:/runs")
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "local": (),
    "slurm": (*THERE, "--gpus", "1"),
    "ssh": (*THERE, "--hosts", "a"),
    "mpi": (*THERE, "--hosts", "a:8"),
    "ray": (*THERE, "--nodes", "1"),
    "kubernetes": (*VOLUME, "--run", "/runs/first"),
}


@pytest.mark.parametrize("mode", OUTPUT_MODES)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_are_told_how_to_speak(capsys: Capture, launcher: str, mode: str) -> None:
    words = ("launch", launcher, "debug", *LAUNCHERS[launcher])
    text = shown(capsys, *words, "--dry-run", f"--{mode}")
    given = text.replace('"', " ").split()
    assert [name for name in OUTPUT_MODES if f"--{name}" in given] == [mode]
    silent = shown(capsys, *words, "--dry-run")
    assert not any(f"--{name}" in silent.split() for name in OUTPUT_MODES)


def test_machines_are_examined_in_one_way(capsys: Capture) -> None:
    text = shown(capsys, "launch", "local", "debug", "--doctor", "--dry-run", "--quiet")
    assert "--quiet" not in text.split()


def test_quiet_leaves_the_end(capsys: Capture, digits: Path, tmp_path: Path) -> None:
    text = shown(
        capsys, "train", "debug", "--data", digits, "--run", tmp_path / "run", *SHORT, "--quiet"
    )
    assert text.count("\n") == 2 and f"{tmp_path / 'run'}" in text


@pytest.mark.night
def test_every_rank_says_its_lines(
    capfd: pytest.CaptureFixture[str], digits: Path, tmp_path: Path
) -> None:
    words = ("--data", digits, "--run", tmp_path / "run", *SHORT, "--ranks", 2, "--all-ranks")
    assert run("launch", "local", "debug", *words) == 0
    *lines, end, report = capfd.readouterr().out.splitlines()
    assert end.startswith("top-1 ")
    assert report == f"its report: {tmp_path / 'run' / 'report.html'}"
    for rank in range(2):
        prefix = f"[rank {rank} {HOST}] "
        said = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        steps = [line.split()[1] for line in said if line.startswith("step ")]
        assert steps == ["1/2", "2/2"]
        assert any("val top-1" in line for line in said)
        assert any(f"  {2} x " in line for line in said)
    assert all(re.match(rf"\[rank [01] {HOST}\] ", line) for line in lines)
