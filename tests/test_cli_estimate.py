"""`trainyard estimate` as it is typed."""

import json
from pathlib import Path

import pytest

from tests.command_line import Capture, complaint, run, shown
from trainyard.commands.estimate_tables import _plain

SOME = ("--gpus", "8,16", "--samples", "1433")
DIGITS = ("estimate", "digits", "--step-ms", "50", "--form", "none", *SOME)
BY_SHEET = ("estimate", "digits", "--device", "t4", *SOME)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_nothing_need_be_measured(capsys: Capture) -> None:
    said = shown(capsys, *BY_SHEET)
    assert "digits: 0.4697 million weights, 0.0252 GFLOP" in said
    assert "GPUs   time" in said
    assert "Images can be loaded " in said
    assert "Memory on one of 8 GPUs: weights 1.89 MB, gradients 1.88 MB" in said
    assert "One GPU, by its data sheet: T4, 320 GB/s of memory" in said
    assert "Money: 0.5 USD per GPU and hour (a round price of " in said
    assert "Nodes of 8: 12 GB/s, 5.7 us inside" in said  # a T4 has no NVLink
    assert "one-peer" not in said


def test_what_was_measured(capsys: Capture) -> None:
    said = shown(capsys, *DIGITS)
    assert "Nodes of 8: 200 GB/s, 3.4 us inside, 12.5 GB/s, 14 us between" in said
    assert "One GPU, measured: 8 images of 32 pixels in 50 ms, of which 10 ms whatever" in said
    assert "if compute is 1.1, " in said
    assert "USD" not in said
    assert "bound by device" in said
    # The pace alone: the memory of the GPU is not known, and what it draws neither.
    assert "would fit" not in said
    assert "kWh" not in said
    assert "MFU" not in said


def test_a_table_of_averagers_for_each_number_of_gpus(capsys: Capture) -> None:
    said = shown(capsys, *DIGITS, "--averagers")
    assert "8 GPUs, 1 x 8: 8 images each, 50.0 ms of compute in a step" in said
    assert "16 GPUs, 2 x 8: 4 images each, 30.0 ms" in said
    for name in ("allreduce", "alternating-exponential-ring", "periodic", "sharded"):
        assert f"  {name} " in said


def test_json(capsys: Capture) -> None:
    found = json.loads(shown(capsys, *DIGITS, "--json", "--price-per-gpu-hour", "2"))
    assert found["is_measured"]
    assert found["device"] is None
    assert [each["gpus"] for each in found["runs"]] == [8, 16]
    for each in found["runs"]:
        hours = each["hours"]
        assert hours["low"] < hours["likely"] < hours["high"]
        assert each["cost"] == pytest.approx(hours["likely"] * each["gpus"] * 2)
        assert each["bound"] == "device"
        own, *others = each["averagers"]
        assert own["hours"] == pytest.approx(hours["likely"])
        for row in (own, *others):
            if "reason" in row:
                assert row["average"]["topology"] == "alternating-exponential-ring"
                continue
            parts = ("compute", "network", "waiting", "data")
            assert row["step_ms"] == pytest.approx(sum(row[f"{part}_ms"] for part in parts))
            assert row["cost"] == pytest.approx(row["hours"] * each["gpus"] * 2)
            assert 0 < row["efficiency"] <= 1


def test_a_data_sheet_as_json(capsys: Capture) -> None:
    found = json.loads(shown(capsys, *BY_SHEET, "--json", "--cores-per-gpu", "1"))
    assert found["device"]["name"] == "T4"
    eight, sixteen = found["runs"]
    assert eight["bound"] == sixteen["bound"] == "decoding"
    assert eight["reserve"] < 1
    assert any("packed" in key for key in eight["advice"])
    assert eight["images_per_s"] == pytest.approx(8 * 2462)
    assert 0 < eight["utilisation"] < 1
    assert eight["kwh"] == pytest.approx(
        1.2 * 8 * eight["hours"]["likely"] * 0.001 * (150 + 70 * 0.3), rel=0.25
    )


def test_links(capsys: Capture) -> None:
    some = ("--link", "1gbe", "--bandwidth", "4", "--latency", "500", "--inside", "pcie3")
    said = shown(capsys, *DIGITS, *some, "--gpus-per-node", "4")
    assert "Nodes of 4: 12 GB/s, 5.7 us inside, 500 MB/s, 500 us between" in said
    assert "known are nvlink2," in complaint(capsys, *DIGITS, "--link", "dialup")
    assert "--inside dialup" in complaint(capsys, *DIGITS, "--inside", "dialup")


def test_recipe_keys_count(capsys: Capture) -> None:
    keys = ("--average.name", "periodic", "--average.every", "8")
    assert "  periodic, every 8 " in shown(capsys, *DIGITS, *keys, "--averagers")


def test_prices_of_ones_own(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text("t4 = 0.25\n")
    said = shown(capsys, *BY_SHEET, "--prices", tmp_path / "prices.toml")
    assert "0.25 USD per GPU and hour (yours)" in said
    (tmp_path / "prices.toml").write_text("t5 = 0.25\n")
    said = complaint(capsys, *BY_SHEET, "--prices", tmp_path / "prices.toml")
    assert "'t5' is not a known GPU" in said


def test_what_does_not_fit(capsys: Capture) -> None:
    big = ("estimate", "resnet18-step", "--device", "t4", "--gpus", "8", "--batch.size", "32768")
    said = shown(capsys, *big)
    assert "of 512 images at a time (of 4,096 in a step); " in said
    said = shown(capsys, *big, "--average.name", "sharded")  # ranks in step cannot try fewer
    assert "too large for the memory. What would change that: batch.micro = " in said


def test_a_run_tells_its_pace_and_its_device(capsys: Capture, digits: Path, tmp_path: Path) -> None:
    options = ("--run.length", "6 steps", "--run.log_every", "2 steps", "--data.threads", "1")
    folder = tmp_path / "run"
    assert run("train", "debug", "--data", digits, "--run", folder, *options) == 0
    environment = json.loads((folder / "environment.json").read_text())
    environment["devices"] = ["NVIDIA H200"]  # as if it had been made there
    (folder / "environment.json").write_text(json.dumps(environment))
    found = json.loads(
        shown(capsys, "estimate", "debug", "--run", folder, "--fixed-ms", "0", *SOME, "--json")
    )
    assert found["device"]["name"] == "H200"
    assert found["is_measured"]
    assert found["price_per_gpu_hour"] == found["device"]["price_per_hour"]


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ((), ["8", "64"]),
        (("--weak",), ["8", "64", "512"]),
        (("--gpus-per-node", "6"), ["6", "48"]),
        (("--batch.size", "4"), ["1"]),
    ],
)
def test_numbers_of_gpus_that_nobody_asked_for_fit(
    options: tuple[str, ...], gpus: list[str], capsys: Capture
) -> None:
    """It was refused that a batch of 64 is not enough for 512 GPUs."""
    words = ("estimate", "digits", "--device", "t4", "--samples", "1433")
    rows = [line.split() for line in shown(capsys, *words, *options).splitlines()]
    begin = next(number for number, row in enumerate(rows) if row[:1] == ["GPUs"])
    assert [row[0] for row in rows[begin + 2 : begin + 2 + len(gpus)]] == gpus
    assert not rows[begin + 2 + len(gpus)]


def test_numbers_have_no_exponents() -> None:
    assert [_plain(number, 2) for number in (5812.0, 3.42, 0.25, 0.0000123)] == [
        *("5,800", "3.4", "0.25", "0.000012"),
    ]


def test_what_is_missing_or_wrong_is_said(capsys: Capture, tmp_path: Path) -> None:
    assert "how fast is a GPU" in complaint(capsys, "estimate", "digits")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert "how fast is a GPU" in complaint(capsys, *DIGITS, "--run", tmp_path / "run")
    assert "no run directory" in complaint(capsys, "estimate", "digits", "--run", tmp_path)
    assert "'eight'" in complaint(capsys, "estimate", "digits", "--gpus", "8,eight")
    assert "'-1'" in complaint(capsys, *DIGITS, "--jitter=-1")
    assert "'0.5' is not a number" in complaint(capsys, *DIGITS, "--pue", "0.5")
    assert "known are jpeg," in complaint(capsys, *DIGITS, "--form", "gif")
    assert "did you mean 't4'?" in complaint(capsys, *DIGITS, "--device", "T4s")
    assert "no whole number of nodes" in complaint(capsys, *DIGITS, "--gpus", "12")
    assert "is not enough for 128 GPUs" in complaint(capsys, *DIGITS, "--gpus", "128")
    weak = shown(capsys, *DIGITS, "--gpus", "1,128", "--weak", "--averagers")
    assert "128 GPUs, 16 x 8: 64 images" in weak
    bf16 = ("--batch.precision", "bf16")
    assert "set --batch.precision fp16" in complaint(capsys, *BY_SHEET, *bf16)
