"""Runs of the debug recipe on a GPU: each precision, mode and averager, stops, faults."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import newest, run, shown
from tests.cuts import cut
from tests.gpus import needs_gpu, pretend
from tests.runs import events, hooked
from trainyard.errors import Stopped
from trainyard.training.step import TrainStep

Capture = pytest.CaptureFixture[str]
STEPS = 6
PLAIN = {
    "run.length": f"{STEPS} steps",
    "run.log_every": "1 step",
    "run.save_every": f"{STEPS} steps",
    "run.eval_every": f"{STEPS} steps",
    "optim.name": "sgd",  # Adam's first steps turn a rounding error into a whole step
    "optim.lr": "0.01",
    "data.threads": "2",
}
TOLERANCES = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 3e-2, "fp16": 2e-2}  # of a loss, relative
RESNET = {"model.name": "test_resnet", "model.channels_last": "true"}


def words(digits: Path, folder: Path, *changes: dict[str, str]) -> list[str]:
    options = dict(PLAIN)
    for change in changes:
        options |= change
    keys = [word for key, value in options.items() for word in (f"--{key}", value)]
    return ["train", "debug", "--data", str(digits), "--run", str(folder), "--json", *keys]


def trained(digits: Path, folder: Path, *changes: dict[str, str]) -> list[float]:
    """The losses of a run."""
    assert run(*words(digits, folder, *changes)) == 0
    return [line["loss"] for line in lines(folder) if line["kind"] == "train"]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("model", ["test_vit", "test_resnet"])
@pytest.mark.parametrize("precision", TOLERANCES)
def test_losses_are_those_of_the_cpu(
    precision: str, model: str, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = RESNET if model == "test_resnet" else {}
    losses = trained(digits, tmp_path / "gpu", changes, {"batch.precision": precision})
    pretend(monkeypatch, 0)
    expected = trained(digits, tmp_path / "cpu", changes)
    assert losses == pytest.approx(expected, rel=TOLERANCES[precision])
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("model", ["test_vit", "test_resnet"])
@pytest.mark.parametrize("precision", TOLERANCES)
def test_stopped_and_resumed_it_ends_alike_bit_for_bit(
    precision: str, model: str, digits: Path, tmp_path: Path, deterministic: None
) -> None:
    changes = {"batch.precision": precision, "model.ema_decay": "0.9", "optim.name": "adamw"}
    changes |= RESNET if model == "test_resnet" else {"model.drop_path": "0.2"}
    trained(digits, tmp_path / "whole", changes)
    with cut("stopped", 3):
        assert run(*words(digits, tmp_path / "cut", changes)) == Stopped.exit_code
    assert newest(tmp_path / "cut").name == "step-00000003"
    trained(digits, tmp_path / "cut", changes)
    for name in ("model.safetensors", "ema.safetensors"):
        found, whole = (load_file(newest(tmp_path / each) / name) for each in ("cut", "whole"))
        for key, tensor in whole.items():
            assert torch.equal(found[key], tensor), f"{name}: {key}"


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("model", ["test_vit", "test_resnet"])
@needs_gpu
def test_compiled_it_trains_as_it_does_otherwise(
    model: str, mode: str, digits: Path, tmp_path: Path
) -> None:
    changes = {"batch.precision": "bf16", "batch.micro": "16"}
    changes |= RESNET if model == "test_resnet" else {}
    plain = trained(digits, tmp_path / "plain", changes)
    compiled = trained(digits, tmp_path / "compiled", changes, {"model.compile": mode})
    assert compiled == pytest.approx(plain, rel=2e-2)


@needs_gpu
def test_a_compiled_update_is_the_plain_one(digits: Path, tmp_path: Path) -> None:
    changes = {"optim.name": "adamw", "optim.lr": "1e-3"}
    plain = trained(digits, tmp_path / "plain", changes)
    compiled = trained(digits, tmp_path / "compiled", changes, {"optim.compile": "true"})
    assert compiled == pytest.approx(plain, rel=1e-3)


def test_a_moving_average_in_host_memory_is_the_devices(
    digits: Path, tmp_path: Path, deterministic: None
) -> None:
    changes = RESNET | {"model.ema_decay": "0.9"}
    trained(digits, tmp_path / "device", changes)
    trained(digits, tmp_path / "host", changes, {"model.ema_cpu": "true"})
    device, host = (
        load_file(newest(tmp_path / each) / "ema.safetensors") for each in ("device", "host")
    )
    for key, tensor in device.items():
        torch.testing.assert_close(host[key], tensor, rtol=1e-5, atol=1e-6, msg=key)


def test_an_evaluation_repeats_that_of_the_run(
    digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    trained(digits, tmp_path / "run", RESNET, {"batch.precision": "bf16"})
    said = json.loads(shown(capsys, "evaluate", tmp_path / "run", "--json"))
    found = said[0] if isinstance(said, list) else said
    expected = next(line for line in lines(tmp_path / "run") if line["kind"] == "val")
    assert found["top1"] == pytest.approx(expected["top1"], abs=0.004)  # one image of 364


def test_updates_that_are_not_finite_are_skipped(digits: Path, tmp_path: Path) -> None:
    def spoil(_: TrainStep, batch: Any, step: int) -> None:
        if step in (2, 3):
            batch.images_BCHW[0, 0, 0, 0] = torch.nan

    with hooked(before=spoil):
        trained(digits, tmp_path / "run", RESNET, {"batch.precision": "bf16"})
    skipped = [line["skipped"] for line in lines(tmp_path / "run") if line["kind"] == "train"]
    assert skipped == [0, 0, 1, 1, 0, 0]
    for key, tensor in load_file(newest(tmp_path / "run") / "model.safetensors").items():
        assert tensor.isfinite().all(), key


@needs_gpu
def test_a_micro_batch_that_fits_is_found(digits: Path, tmp_path: Path) -> None:
    """With little memory left to torch, a batch of 512 is cut until it fits."""
    big = {
        "model.name": "resnet18",
        "data.image_size": "64",
        "batch.size": "512",
        "run.length": "3 steps",
    }
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    now = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((now + 700e6) / total)
    try:
        losses = trained(digits, tmp_path / "run", big)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert len(losses) == 3
    assert events(tmp_path / "run", "smaller micro-batch")


RANKS = torch.cuda.device_count() or 2
AVERAGERS = {
    "allreduce": {},
    "allreduce, sync": {"average.batch_norm": "sync"} | RESNET,
    "allreduce, bf16": {"average.compress": "bf16"},
    "gossip": {"average.name": "gossip"},
    "gossip, bf16": {"average.name": "gossip", "average.compress": "bf16"},
    "periodic": {"average.name": "periodic", "average.every": "2"},
    "sharded": {"average.name": "sharded"},
    "sharded, bf16": {"average.name": "sharded", "batch.precision": "bf16"},
}


def trainyard(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainyard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("name", AVERAGERS)
@pytest.mark.skipif(RANKS < 2, reason="no GPU at hand, or a single one")
def test_each_averager_on_all_gpus(name: str, digits: Path, tmp_path: Path) -> None:
    if name == "allreduce, sync" and not torch.cuda.is_available():
        pytest.skip("no GPU at hand: batch norm of all ranks needs them")
    options = words(digits, tmp_path / "run", AVERAGERS[name])[4:]
    done = trainyard("launch", "local", "debug", "--data", str(digits),
                     *("--ranks", str(RANKS)), *options)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    found = [line for line in lines(tmp_path / "run") if line["kind"] == "train"]
    assert {line["world_size"] for line in found} == {RANKS}
    assert all(0 < line["loss"] < 4 for line in found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["test_vit", "test_resnet"])
def test_virtual_ranks_have_the_same_bits(
    model: str, precision: str, digits: Path, tmp_path: Path
) -> None:
    """On one GPU twice over, and on as many as there are, up to eight."""
    changes = {"batch.virtual_ranks": "8", "batch.precision": precision}
    changes |= RESNET if model == "test_resnet" else {"model.drop_path": "0.2"}
    found = []
    for number, ranks in enumerate([1, 1, *(n for n in (2, 4, 8) if n <= RANKS)]):
        folder = tmp_path / str(number)
        options = words(digits, folder, changes)[4:]
        done = trainyard("launch", "local", "debug", "--data", str(digits),
                         *("--ranks", str(ranks)), *options)  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
        found.append((newest(folder) / "model.safetensors").read_bytes())
    assert all(content == found[0] for content in found)


@needs_gpu
def test_the_doctor_names_the_gpu_and_its_driver() -> None:
    rows = json.loads(trainyard("doctor", "--quick", "--json").stdout)["rows"]
    (found,) = [row["found"] for row in rows if row["what"] == "GPUs"]
    assert torch.cuda.get_device_name(0) in found
    assert "driver" in found and "unknown" not in found


def test_the_demo(digits: Path, tmp_path: Path) -> None:
    """Two ranks, also where there is a single GPU: then they train on the CPU."""
    done = trainyard("launch", "local", "digits", "--ranks", "2", "--data", str(digits),
                     *("--run", str(tmp_path / "run"), "--run.length", "1 epoch"))  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert lines(tmp_path / "run")[-1]["top1"] > 0.1
