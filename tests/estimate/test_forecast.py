"""A recipe's hours: what they are made of, and what is refused."""

import json
from pathlib import Path

import pytest

from trainyard.averaging.config import AverageConfig
from trainyard.course import build_course
from trainyard.errors import InputError, RecipeError
from trainyard.estimate.forecast import Outlook, Pace, Task, build_pace, forecast, pace_of_run
from trainyard.estimate.jitter import Jitter
from trainyard.estimate.job import build_job
from trainyard.estimate.network import LINKS, Cluster, Link
from trainyard.estimate.predict import describe, predict
from trainyard.estimate.supply import Storage, Supply

JOB = build_job([1_000_000] * 25)
PACE = Pace(images=64, seconds=0.1, fixed=0.02, image_size=100)
COURSE = build_course(
    "2 epochs",
    epoch_samples=6400,
    batch=64,
    image_size=100,
    batch_stages=["1 epoch: 128"],
    size_stages=["50%: 200"],
)
FREE = Cluster(8, Link(0, 1e30), Link(0, 1e30), Jitter(0))
SLOW = Cluster(8, LINKS["nvlink3"], LINKS["10gbe"])
AVERAGES = [
    AverageConfig(),
    AverageConfig(name="gossip"),
    AverageConfig(name="gossip", overlap=False),
    AverageConfig(name="gossip", hierarchical=True),
    AverageConfig(name="periodic", every=16),
    AverageConfig(name="periodic", hierarchical=True, overlap=True),
    AverageConfig(name="sharded"),
]
names = pytest.mark.parametrize("average", AVERAGES, ids=describe)


def outlook(cluster: Cluster, gpus: int, more_batch: float = 1.0, **average: object) -> Outlook:
    task = Task(AverageConfig.model_validate(average), COURSE, JOB, PACE)
    return forecast(task, cluster, gpus=gpus, more_batch=more_batch)


def test_pace() -> None:
    assert PACE.compute(64, 100) == pytest.approx(0.1)
    assert PACE.compute(32, 100) == pytest.approx(0.02 + 0.04)
    assert PACE.compute(64, 200) == pytest.approx(0.02 + 0.32)
    with pytest.raises(InputError, match="--fixed-ms 10 is no part of a step of 8 ms"):
        build_pace(seconds=0.008, images=64, fixed=0.01, image_size=100)


def test_where_messages_and_waiting_cost_nothing_a_run_is_its_compute() -> None:
    found = outlook(FREE, 16)
    # 100 steps of 4 images, then 50 of 8 which are four times as large.
    wanted = 100 * (0.02 + 0.08 / 16) + 50 * (0.02 + 4 * 0.08 * 8 / 64)
    assert (found.nodes, found.images, len(found.rows)) == (2, 4, 9)
    for row in found.rows:
        assert row.step is not None
        assert row.seconds == pytest.approx(wanted)
        assert row.step.compute == pytest.approx(wanted / 150)
        assert row.step[1:] == pytest.approx((0, 0, 0))
    assert found.ideal == pytest.approx((100 * 0.1 + 50 * 2 * 0.34) / 16)


def test_the_batch_may_grow_with_the_gpus() -> None:
    found = outlook(FREE, 16, more_batch=16)
    assert found.images == 64
    # The second half has 128 images to a step, and so half as many fixed parts.
    assert found.ideal - found.rows[0].seconds == pytest.approx(6400 / 64 / 16 / 2 * 0.02)


def test_what_a_recipe_asks_for_comes_first() -> None:
    assert [describe(row.average) for row in outlook(FREE, 8).rows][:2] == ["allreduce", "complete"]
    first = outlook(FREE, 8, name="periodic", every=4, compress="int8").rows[0]
    assert describe(first.average) == "periodic, every 4, int8"


def test_data_that_come_too_slowly_are_waited_for() -> None:
    # 4 images to a GPU take 0.025 s, 8 larger ones 0.06 s; two nodes load 800 a second.
    supply = Supply(Storage(images=100.0, num_bytes=1e5), cores=4)
    task = Task(AverageConfig(), COURSE, JOB, PACE, supply)
    (first, *_) = forecast(task, FREE, gpus=16).rows
    assert first.step is not None
    assert first.step.data == pytest.approx((100 * (0.08 - 0.025) + 50 * (0.16 - 0.06)) / 150)
    assert first.seconds == pytest.approx(100 * 0.08 + 50 * 0.16)


def test_a_topology_that_needs_other_numbers_says_so() -> None:
    reasons = [row.reason for row in outlook(FREE, 24).rows if row.step is None]
    assert len(reasons) == 3  # of the exponential ones, and of nodes
    assert all("needs" in reason for reason in reasons)


def test_a_batch_has_a_sample_for_each_gpu() -> None:
    with pytest.raises(InputError, match="a batch of 64 is not enough for 128 GPUs"):
        outlook(FREE, 128)


@names
def test_a_prediction_is_the_same_each_time_and_longer_than_its_compute(
    average: AverageConfig,
) -> None:
    found = [predict(average, JOB, SLOW, ranks=32, compute=0.1) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].compute == 0.1
    assert min(found[0]) >= 0


@names
def test_slower_links_and_more_compute_take_longer(average: AverageConfig) -> None:
    slower = Cluster(8, LINKS["nvlink3"], LINKS["1gbe"])
    found = [
        predict(average, JOB, cluster, ranks=32, compute=compute).total
        for cluster, compute in ((SLOW, 0.01), (SLOW, 1.0), (slower, 1.0))
    ]
    assert found == sorted(found)
    assert found[0] < found[1]


def test_fewer_peers_are_waited_for_less() -> None:
    cluster = Cluster(8, Link(0, 1e30), Link(0, 1e30), Jitter(0.1))
    allreduce, gossip, periodic = (
        predict(average, JOB, cluster, ranks=64, compute=1.0).waiting
        for average in (AVERAGES[0], AVERAGES[1], AVERAGES[4])
    )
    # The largest of 64 normal numbers is 2.4 standard deviations above their mean.
    assert allreduce == pytest.approx(0.24, rel=0.15)
    assert gossip < allreduce / 4
    assert periodic < allreduce / 2


def test_compressed_messages_are_shorter() -> None:
    bare = predict(AVERAGES[4], JOB, SLOW, ranks=32, compute=0.1).network
    config = AverageConfig(name="periodic", every=16, compress="int8")
    assert predict(config, JOB, SLOW, ranks=32, compute=0.1).network == pytest.approx(
        bare / 4, rel=0.05
    )


@pytest.mark.parametrize(
    ("options", "network", "inside"),
    [
        ({"name": "gossip"}, 1, 3 / 4),
        ({"name": "gossip", "overlap": False}, 1, 3 / 4 + 1 / 4),
        ({"name": "periodic", "every": 1, "overlap": True}, 1, 0),
        ({"name": "periodic", "every": 1}, 1, 3 / 4 + 1 / 4),
        ({"name": "periodic", "every": 1, "compress": "int8"}, 1 / 4, 3 / 4 + 1 / 16),
    ],
)
def test_a_nodes_weights_cross_the_network_once(
    options: dict[str, object], network: float, inside: float
) -> None:
    """Inside it gradients are averaged and slices gathered, which gossip cannot hide; not hidden,
    a slice also passes the links of the node."""
    average = AverageConfig.model_validate(options | {"hierarchical": True})
    free, slow = Link(0, 1e30), Link(0, 1e8)
    found = [
        predict(average, JOB, cluster, ranks=8, compute=0.0).total * 1e8 / JOB.num_bytes
        for cluster in (
            Cluster(4, free, slow, Jitter(0), ("ring",)),
            Cluster(4, slow, free, Jitter(0), ("ring",)),
        )
    ]
    assert found == pytest.approx([network, 2 * 3 / 4 + inside])


def test_an_unknown_topology_is_refused() -> None:
    with pytest.raises(RecipeError, match="star"):
        predict(AverageConfig(name="gossip", topology="star"), JOB, SLOW, ranks=8, compute=0.1)


def run_of(folder: Path, *rates: float) -> Path:
    recipe = (
        "[data]\nimage_size = 160\n[schedule]\nbatch_size = ['40 steps: 128']\n[batch]\nsize = 64\n"
    )
    (folder / "recipe.toml").write_text(recipe)
    lines: list[dict[str, object]] = [{"kind": "event", "step": 0, "message": "begun"}]
    for number, rate in enumerate(rates, start=1):
        step = 10 * number
        report = {"step": step, "samples": 64 * step, "epoch": 64 * step / 6400}
        lines.append({"kind": "train", "images_per_s": rate, "data_wait": 0.5} | report)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_pace_of_a_run(tmp_path: Path) -> None:
    # Not the first report, nor those of the larger batch, nor the half that was spent waiting.
    run = run_of(tmp_path, 1.0, 90.0, 100.0, 110.0, 9.0, 9.0)
    pace = pace_of_run(run, gpus=4, fixed=0.01)
    assert pace == Pace(images=16, seconds=64 / 200, fixed=0.01, image_size=160)


def test_a_run_without_a_pace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run directory"):
        pace_of_run(tmp_path / "none", gpus=1, fixed=0.0)
    with pytest.raises(InputError, match="no second report"):
        pace_of_run(run_of(tmp_path, 5.0), gpus=1, fixed=0.0)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="no second report"):
        pace_of_run(tmp_path, gpus=1, fixed=0.0)
