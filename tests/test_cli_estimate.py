"""`trainyard estimate` as it is typed."""

import json
from pathlib import Path

import pytest

from tests.command_line import Capture, complaint, shown

DIGITS = ("estimate", "digits", "--step-ms", "50", "--gpus", "8,16", "--samples", "1433")


def test_a_table_for_each_number_of_gpus(capsys: Capture) -> None:
    said = shown(capsys, *DIGITS)
    assert "nodes of 8: 200 GB/s, 3.4 us inside, 12.5 GB/s, 14 us between" in said
    assert "one GPU: 8 images of 32 pixels in 50 ms, of which 10 ms whatever" in said
    assert "8 GPUs, 1 x 8: 8 images each, 50.0 ms of compute in a step" in said
    assert "16 GPUs, 2 x 8: 4 images each, 30.0 ms" in said
    for name in ("allreduce", "alternating-exponential-ring", "periodic, overlapped", "sharded"):
        assert f"  {name} " in said
    assert "cost" not in said


def test_json(capsys: Capture) -> None:
    rows = json.loads(shown(capsys, *DIGITS, "--json", "--price-per-gpu-hour", "2"))
    assert {row["gpus"] for row in rows} == {8, 16}
    assert [row["average"]["topology"] for row in rows if "reason" in row] == [
        "alternating-exponential-ring"
    ]
    for row in rows:
        if "reason" not in row:
            parts = row["compute_ms"] + row["network_ms"] + row["waiting_ms"]
            assert row["step_ms"] == pytest.approx(parts)
            assert row["cost"] == pytest.approx(row["hours"] * row["gpus"] * 2)
            assert 0 < row["efficiency"] <= 1


def test_links(capsys: Capture) -> None:
    some = ("--link", "1gbe", "--bandwidth", "4", "--latency", "500", "--inside", "pcie3")
    said = shown(capsys, *DIGITS, *some, "--gpus-per-node", "4")
    assert "nodes of 4: 12 GB/s, 5.7 us inside, 500 MB/s, 500 us between" in said
    assert "known are nvlink2," in complaint(capsys, *DIGITS, "--link", "dialup")
    assert "--inside dialup" in complaint(capsys, *DIGITS, "--inside", "dialup")


def test_recipe_keys_count(capsys: Capture) -> None:
    keys = ("--average.name", "periodic", "--average.every", "8")
    assert "  periodic, every 8 " in shown(capsys, *DIGITS, *keys)


def test_what_is_missing_or_wrong_is_said(capsys: Capture, tmp_path: Path) -> None:
    assert "how fast is a GPU" in complaint(capsys, "estimate", "digits")
    assert "how fast is a GPU" in complaint(capsys, *DIGITS, "--run", tmp_path)
    assert "no run directory" in complaint(capsys, "estimate", "digits", "--run", tmp_path)
    assert "'eight'" in complaint(capsys, "estimate", "digits", "--gpus", "8,eight")
    assert "'-1'" in complaint(capsys, *DIGITS, "--jitter=-1")
    assert "no whole number of nodes" in complaint(capsys, *DIGITS, "--gpus", "12")
    assert "is not enough for 128 GPUs" in complaint(capsys, *DIGITS, "--gpus", "128")
    assert "128 GPUs, 16 x 8: 64 images" in shown(capsys, *DIGITS, "--gpus", "1,128", "--weak")
