"""Tests of benchmarks/gpu: choice of parts, result files, and the parts that run on a CPU."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import place
from benchmarks.gpu.__main__ import PARTS, run, save

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_a_part_that_runs_again_replaces_its_section(tmp_path: Path) -> None:
    facts = {"gpu": "NVIDIA H100 80GB HBM3"}

    def part(seconds: int) -> dict[str, Any]:
        return {"ending": "exit code 0", "seconds": seconds, "tables": {"T": [{"a": seconds}]}}

    save(facts, "steps", part(1), tmp_path)
    save(facts, "tests", part(2), tmp_path)
    figures, text = save(facts, "steps", part(3), tmp_path)
    assert figures.name.endswith("-h100-80gb-hbm3-gpu.json")
    assert list(json.loads(figures.read_text())["parts"]) == ["tests", "steps"]
    assert text.read_text().count(PARTS["steps"]) == 1
    assert "Part steps: exit code 0, 3 s." in text.read_text()


def test_a_part_beyond_its_limit_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.gpu.__main__.WORK", tmp_path)
    found = run("steps", place.prepare(), 0.5, dry=True)
    assert found["ending"] == "stopped after 0 s"
    assert found["tables"] == {}


def test_packages_that_are_missing_or_old_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.lacking() == []
    real = metadata.version
    monkeypatch.setattr(place, "version", lambda name: {"timm": "1.0.2"}.get(name) or real(name))
    assert place.lacking() == ["timm"]


def test_cheap_parts_on_the_cpu() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "transforms", "accuracy", "--dry"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "transforms: exit code 0" in done.stdout
    assert "accuracy: exit code 0" in done.stdout
