"""`trainyard estimate` as it is typed."""

import json
from pathlib import Path

import pytest

from tests.command_line import Capture, run, shown
from tests.errors import check, refused
from trainyard.cli.estimate import IMAGES_PER_CORE

pytestmark = pytest.mark.slow

DIGITS = ("estimate", "digits", "--device", "t4", "--nodes", "1,2", "--samples", "1433")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_a_data_sheet(capsys: Capture) -> None:
    output = shown(capsys, *DIGITS)
    assert "digits: 469,688 weights, 0.03 GFLOP" in output
    assert {"1.89", "1.88", "T4"} <= set(output.split())


def test_json(capsys: Capture) -> None:
    found = json.loads(shown(capsys, *DIGITS, "--json", "--price", "2"))
    assert found["device"]["name"] == "T4"
    assert found["measured_gpus"] is None
    assert [each["gpus"] for each in found["runs"]] == [8, 16]
    for each in found["runs"]:
        hours = each["hours"]
        assert hours["low"] < hours["likely"] < hours["high"]
        assert each["cost"] == pytest.approx(hours["likely"] * each["gpus"] * 2)
        assert 0 < each["mfu"] < 1


def test_gpus_are_of_a_node_as_of_the_launchers(capsys: Capture) -> None:
    """They were those of all nodes, which had 8."""
    slow = (*DIGITS, "--network", "1")
    found = json.loads(shown(capsys, *slow, "--json", "--gpus", "4"))
    assert [each["gpus"] for each in found["runs"]] == [4, 8]
    _, of_fours = found["runs"]
    of_eights, _ = json.loads(shown(capsys, *slow, "--json"))["runs"]
    assert of_fours["step"]["network"] > of_eights["step"]["network"]  # between nodes
    assert "a node of 4" in shown(capsys, *DIGITS, "--gpus", "4")


def test_decoding_against_cores(capsys: Capture) -> None:
    found = json.loads(shown(capsys, *DIGITS, "--json", "--cores", "1"))
    eight, sixteen = found["runs"]
    assert eight["bound"] == sixteen["bound"] == "decoding"
    assert eight["margin"] < 1
    assert eight["images_per_s"] == pytest.approx(8 * 2462)
    found = json.loads(shown(capsys, *DIGITS, "--json", "--images-per-core", "1000000"))
    assert found["runs"][0]["bound"] == "launches"


def test_the_speed_of_decoding_stands_in_the_file_that_is_cited() -> None:
    """It did not: estimates decoded 13% too slowly."""
    results = Path(__file__).parents[1] / "benchmarks/results/2026-11-22-2-core-vm-loader.md"
    _, full, *_ = results.read_text().split("## Whole loaders")
    (row,) = (r for r in full.splitlines() if r.startswith("| Trainyard, WebDataset |"))
    assert row.split("|")[2].split()[0] == f"{IMAGES_PER_CORE:,}"


def test_what_does_not_fit(capsys: Capture) -> None:
    big = ("estimate", "resnet18-step", "--device", "t4", "--gpus", "8", "--batch.size", "32768")
    assert "of 512 images at a time, of 4,096 in a step; " in shown(capsys, *big)
    output = shown(capsys, *big, "--average.name", "sharded")  # ranks in step cannot try fewer
    assert "too large" in output


def test_a_run_knows_its_pace_its_gpus_and_its_data(
    capsys: Capture, digits: Path, tmp_path: Path
) -> None:
    options = ("--run.length", "6 steps", "--run.log_every", "2 steps", "--data.threads", "1")
    folder = tmp_path / "run"
    assert run("train", "debug", "--data", digits, "--run", folder, *options) == 0
    words = ("estimate", "debug", "--measured", folder)
    output = shown(capsys, *words)
    assert "1,433" in output
    environment = json.loads((folder / "environment.json").read_text())
    environment["devices"] = ["NVIDIA H200"]  # as if it had been made there
    (folder / "environment.json").write_text(json.dumps(environment))
    found = json.loads(shown(capsys, *words, "--json"))
    assert found["device"]["name"] == "H200"
    assert found["price_per_gpu_hour"] == found["device"]["price_per_hour"]
    assert [each["gpus"] for each in found["runs"]] == [1]
    error = refused(*words, "--device", "t4")
    check(error, "estimate.device-differs-from-run", device="t4", name="H200")


def test_what_is_missing_or_wrong(tmp_path: Path) -> None:
    digits = ("estimate", "digits")
    check(refused(*digits), "estimate.no-device")
    check(refused(*digits, "--measured", tmp_path), "run.not-a-run-directory", path=tmp_path)
    check(refused(*digits, "--nodes", "8,eight"), "option.invalid", option="--nodes")
    check(refused(*DIGITS, "--network", "0"), "option.invalid", option="--network")
    check(refused(*digits, "--device", "T4s"), "estimate.unknown-gpu", name="T4s")
    check(refused(*DIGITS, "--nodes", "16"), "estimate.batch-too-small", num_gpus=128)
    error = refused(*DIGITS, "--batch.precision", "bf16")
    check(error, "estimate.unsupported-precision", other="fp16")
