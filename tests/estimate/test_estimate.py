"""A recipe's hours: what they are made of, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises
from trainyard.averaging.config import AverageConfig
from trainyard.config import RunConfig, load_recipe, override
from trainyard.course import build_course
from trainyard.estimate.estimate import (
    Cluster,
    Estimate,
    Measured,
    Workload,
    build_workload,
    estimate_run,
    measure_run,
    network_seconds,
)
from trainyard.estimate.memory import Sizes
from trainyard.hardware import accelerators

pytestmark = pytest.mark.slow

T4 = accelerators()["t4"]
COURSE = build_course(
    "2 epochs",
    epoch_samples=6400,
    batch=64,
    image_size=100,
    batch_stages=["1 epoch: 128"],
    size_stages=["50%: 200"],
)
VAL = math.ceil(6400 * 50_000 / 1_281_167)


def measured(gpus: int = 1, folder: Path = Path("run")) -> Measured:
    """A run at 1,000 images/s of 100 pixels on each GPU, in reports of 900 to 1,250."""
    return Measured(folder, gpus, None, 6400, 100, 9, slow=900, rate=1000, fast=1250, loading=None)


def estimated(
    gpus: int,
    of: Measured | None = None,
    *,
    decoding: float = 1e9,
    layers: int = 1,
    keys: dict[str, str] | None = None,
) -> Estimate:
    """A training with 1 MB of gradients and a network of 10 MB/s between nodes."""
    config = override(RunConfig(), {"data.image_size": "100"} | (keys or {}))
    sizes = Sizes(1e6, 1e6, 0, 0, 0)
    workload = Workload(config, COURSE, sizes, 3e9, 3e9, 0, moved=1, kept=(1e6, 0), layers=layers)
    return estimate_run(workload, Cluster(None, of or measured(), decoding, 10e6, 2.0), gpus)


# Seconds on one GPU: 100 steps of 64 images, then 50 of 128 which are four times as large.
TRAINING = 6.4 + 4 * 6.4
EVALUATING = 2 * VAL * 0.001 / 3


def test_a_run_on_one_gpu_is_its_compute() -> None:
    found = estimated(1)
    assert 3600 * found.hours.likely == pytest.approx(TRAINING + EVALUATING)
    assert found.images_per_s == pytest.approx(12_800 / TRAINING)
    assert found.step.compute == pytest.approx(TRAINING / 150)
    assert (found.step.network, found.step.data) == (0, 0)
    assert found.bound == "GPU"
    assert found.cost == pytest.approx(2 * found.hours.likely)
    assert found.hours.low == pytest.approx(found.hours.likely / 1.25)
    assert found.hours.high == pytest.approx(found.hours.likely / 0.9)


@pytest.mark.quick
def test_each_moving_average_is_evaluated() -> None:
    found = estimated(1, keys={"model.ema_decay": "[0.9, 0.99]"})
    assert 3600 * found.hours.likely == pytest.approx(TRAINING + 3 * EVALUATING)


def test_the_network_of_several_gpus_is_measured_once() -> None:
    """8 GPUs were taken for one GPU that is 8 times as fast, and their network came twice."""
    one, eight = estimated(8), estimated(8, measured(8))
    assert one.step.network > 0
    assert eight.step.network == 0
    assert eight.step.compute == pytest.approx(one.step.compute) == pytest.approx(TRAINING / 1200)


@pytest.mark.parametrize("gpus", [1, 4, 16])
def test_several_gpus_measure_no_other_number(gpus: int) -> None:
    with raises("estimate.gpus-differ", num_gpus=8):
        estimated(gpus, measured(8))


def test_data_that_come_too_slowly_are_waited_for() -> None:
    found = estimated(1, decoding=500)
    assert found.bound == "decoding"
    # The second half takes four times as long for an image: it waits for nothing.
    assert found.step.data == pytest.approx(100 * (0.128 - 0.064) / 150)
    assert found.margin == pytest.approx(500 * TRAINING / 12_800)


def test_a_slow_network_bounds() -> None:
    found = estimated(16)
    assert found.bound == "network"
    assert estimated(8).bound == "GPU"


def test_a_batch_has_an_image_for_each_gpu() -> None:
    with raises("estimate.batch-too-small", batch=64, num_gpus=65):
        estimated(65)


def seconds(gpus: int, compute: float = 0.0, **average: Any) -> float:
    """Of 100 MB at 100 MB/s."""
    keys = AverageConfig.model_validate(average)
    return network_seconds(keys, 100e6, gpus, compute=compute, bandwidth=100e6)


def test_messages() -> None:
    assert seconds(1) == seconds(1, name="gossip") == 0
    assert seconds(4) == pytest.approx(1.5)
    assert seconds(4, compress="bf16") == pytest.approx(0.75)
    assert seconds(4, name="sharded") == pytest.approx(2.25)
    assert seconds(4, name="periodic", every=8) == pytest.approx(1.5 / 8)
    assert seconds(4, name="gossip") == pytest.approx(1.0)
    assert seconds(16, name="gossip") == pytest.approx(8.0)  # 8 GPUs of a node share its link


def test_messages_hide_behind_compute_and_the_slowest_gpu_is_waited_for() -> None:
    slowest = 0.05 * 1.0294  # the mean of the largest of 4 normal numbers
    assert seconds(4, compute=3.0) == pytest.approx(3 * slowest, rel=0.03)
    assert seconds(4, compute=0.9) == pytest.approx(1.5 - 0.6 + 0.9 * slowest, rel=0.01)
    assert seconds(4, compute=0.4, name="gossip") == pytest.approx(0.6)
    assert seconds(4, compute=0.4, name="gossip", overlap=False) == pytest.approx(1.0)


def test_no_step_is_shorter_than_its_launches() -> None:
    found = estimated(64, layers=1_000_000)
    assert found.bound == "launches"
    # 100 micro-steps, and 100 in the 50 steps of twice the batch.
    assert found.step.compute == pytest.approx(200 / 150 * 1_000_000 * 3 * 5e-6)


@pytest.mark.parametrize(
    ("keys", "share"),
    [({"model.grad_checkpointing": "true"}, 4 / 3), ({"model.freeze": "blocks.*"}, 1)],
)
def test_what_is_computed_again_and_what_is_not_trained(keys: dict[str, str], share: float) -> None:
    config = load_recipe("debug", {"model.name": "vit_tiny_patch16_224", "data.image_size": "224"})
    plain, other = (build_workload(each, 100) for each in (config, override(config, keys)))
    if share == 1:  # but for the classifier
        assert other.matrix == pytest.approx(plain.matrix / 3, rel=0.15)
    else:
        assert other.matrix == pytest.approx(share * plain.matrix)
    assert other.moved / plain.moved == pytest.approx(other.matrix / plain.matrix)
    assert other.flops == plain.flops  # as a run counts them for its mfu


def run_of(folder: Path, *rates: float, world_size: int = 4) -> Path:
    recipe = (
        "[data]\nimage_size = 160\n[schedule]\nbatch_size = ['40 steps: 128']\n[batch]\nsize = 64\n"
    )
    (folder / "recipe.toml").write_text(recipe)
    lines: list[dict[str, object]] = [{"kind": "event", "step": 0, "message": "begun"}]
    for number, rate in enumerate(rates, start=1):
        step = 10 * number
        report = {"step": step, "samples": 64 * step, "epoch": 64 * step / 6400}
        pace = {"images_per_s": rate, "data_wait": 0.5, "world_size": world_size}
        lines.append({"kind": "train", "images_per_s_loader": 8000, **pace, **report})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_throughput_of_a_run(tmp_path: Path) -> None:
    """The reports know how many GPUs there were."""
    # Not the first report, nor those of the larger batch, nor the half that was spent waiting.
    run = run_of(tmp_path, 1.0, 90.0, 100.0, 110.0, 9.0, 9.0)
    found = measure_run(run, override(RunConfig(), {"batch.size": "64"}))
    assert (found.gpus, found.rate, found.num_reports) == (4, 50, 3)
    assert (found.slow, found.fast) == pytest.approx((46, 54))
    assert (found.loading, found.epoch_samples, found.image_size) == (2000, 6400, 160)


def test_a_run_on_several_gpus_has_one_averager(tmp_path: Path) -> None:
    gossip = override(RunConfig(), {"batch.size": "64", "average.name": "gossip"})
    with raises("estimate.recipe-differs", changes="average.name: allreduce -> gossip"):
        measure_run(run_of(tmp_path, 1.0, 90.0, 100.0), gossip)
    assert measure_run(run_of(tmp_path, 1.0, 90.0, 100.0, world_size=1), gossip).gpus == 1


def test_a_run_without_reports_is_refused(tmp_path: Path) -> None:
    with raises("estimate.too-few-reports"):
        measure_run(run_of(tmp_path, 5.0, world_size=1), RunConfig())
    (tmp_path / "metrics.jsonl").write_text("")
    with raises("estimate.too-few-reports"):
        measure_run(tmp_path, RunConfig())


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.name", "resnet18"), ("batch.precision", "bf16"), ("model.compile", "default")],
)
def test_a_run_with_other_steps_is_refused(key: str, value: str, tmp_path: Path) -> None:
    """A small model's time was taken for that of a large one, without a word."""
    run = run_of(tmp_path, 1.0, 90.0, 100.0)
    with raises("estimate.recipe-differs", path=run) as caught:
        measure_run(run, override(RunConfig(), {key: value}))
    assert f"{key}: " in str(caught.value.fields["changes"])
