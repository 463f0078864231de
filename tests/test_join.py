"""Training on streams: every sample once a pass, however unevenly the ranks' shards are filled."""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import nn

from tests.command_line import Capture, newest, shown
from tests.cuts import Killed, cut
from tests.data.batches import batch_of_images
from tests.data.streams import ids_of, write_shards
from tests.errors import check, raises, refused
from tests.runs import assert_same_end, curve, events, hooked
from tests.runs import progress as progress_of
from tests.spawn import spawn, train_joined
from tests.steps import make_step
from tests.tiers import tiered
from tests.web import FaultyServer
from trainyard.config import RunConfig, load_recipe
from trainyard.course import build_course
from trainyard.data.batch import HostBatch
from trainyard.data.config import DataConfig
from trainyard.data.device.join import JoinFeed, _no_samples
from trainyard.data.open_datasets import open_datasets
from trainyard.errors import TrainyardError
from trainyard.run.model import build_run_model
from trainyard.training.step import TrainStep
from trainyard.world import World

UNEVEN = (1, 0, 7, 1000)
SMALL = (9, 0, 5, 31)  # on two ranks 14 and 31 samples: 4 and 8 batches of 4
OPTIONS = {
    "data.order": "join",
    "data.image_size": "16",
    "data.threads": "1",
    "model.name": "test_vit",
    "run.log_every": "1 step",
    "run.eval_every": "0 steps",
    "run.save_every": "0 steps",
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with uneven and small shards, and validation data."""
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder / "uneven", UNEVEN)
    write_shards(folder / "small", SMALL)
    write_shards(folder / "val", [20])
    return folder


def options(shards: Path, kind: str, **changes: str) -> dict[str, str]:
    """Recipe keys; those of `changes` have __ for the dot."""
    data = {
        "data.train": f"pipe:cat '{shards}/{kind}/part-{{000..003}}.tar'",
        "data.val": str(shards / "val"),
        "data.samples": "1008" if kind == "uneven" else "45",
        "batch.size": "256" if kind == "uneven" else "8",
        "run.length": "2 epochs",
    }
    return OPTIONS | data | {key.replace("__", "."): value for key, value in changes.items()}


def recipe(shards: Path, kind: str, **changes: str) -> RunConfig:
    return load_recipe("debug", options(shards, kind, **changes))


def words(shards: Path, **changes: str) -> list[str]:
    """The command that trains on the small shards."""
    keys = options(shards, "small", **changes)
    return ["train", "debug", "--json", *(w for key in keys for w in (f"--{key}", keys[key]))]


class Seen(NamedTuple):
    """What a rank trained on in a step."""

    step: int
    ids: list[int]
    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]


def train_on(world: World, config: RunConfig, folder: Path) -> list[Seen]:
    """The batches that this rank trained on."""
    torch.set_num_threads(1)
    seen: list[Seen] = []

    def note(_: TrainStep, batch: Any, step: int) -> None:
        columns = (batch.images_BCHW, batch.labels, batch.weights)
        seen.append(Seen(step, batch.ids.tolist(), *(c.clone().numpy() for c in columns)))

    with hooked(before=note):
        train_joined(config, folder, world)
    return seen


def code_of(world: World, config: RunConfig, folder: Path) -> str:
    """The code of the error that ends training; "torch" if it is one of torch's."""
    with pytest.raises((TrainyardError, RuntimeError)) as caught:
        train_on(world, config, folder)
    return getattr(caught.value, "code", "torch")


def ids_by_pass(ranks: Sequence[list[Seen]], ends: Sequence[int]) -> list[list[int]]:
    """All ids that were trained on in each pass, in the order of steps and ranks."""
    found = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        steps = [rank[begin:end] for rank in ranks]
        shares = [seen.ids for step in zip(*steps, strict=True) for seen in step]
        found.append([id_ for share in shares for id_ in share if id_ >= 0])
    return found


def progress(folder: Path) -> dict[str, Any]:
    return progress_of(newest(folder))


# --- every sample once ---

PLAIN_SGD = {
    "optim__name": "sgd",
    "optim__lr": "0.05",
    "optim__weight_decay": "0",
    "optim__momentum": "0.9",
    "schedule__name": "constant",
    "schedule__warmup": "0 steps",
}


@pytest.mark.slow
def test_four_ranks_of_1_0_7_and_1000_samples(shards: Path, tmp_path: Path) -> None:
    """They end, together, every sample was seen once a pass, and as if by one process."""
    config = recipe(shards, "uneven", **PLAIN_SGD)
    ranks = spawn(train_on, 4, config, tmp_path)
    assert progress(tmp_path)["stream"] == {"ranks": 4, "ends": [16, 32], "past": 2016, "seen": 0}
    assert [event["seen"] for event in events(tmp_path, "pass")] == [1008, 1008]
    assert [len(rank) for rank in ranks] == [32] * 4
    first, second = ids_by_pass(ranks, [16, 32])
    assert sorted(first) == sorted(second) == ids_of(UNEVEN)
    assert first != second
    for rank, seen in enumerate(ranks):  # each its own shards
        assert {id_ >> 32 for batch in seen for id_ in batch.ids if id_ >= 0} <= {rank}
        assert all(len(batch.ids) >= 2 for batch in seen)
    counts = curve(tmp_path, "train", "loss")
    assert sorted(counts) == list(range(1, 33))
    alone = trained_alone(config, ranks)
    together = load_file(newest(tmp_path) / "model.safetensors")
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(tensor, together[name], rtol=1e-3, atol=5e-5)


def trained_alone(config: RunConfig, ranks: list[list[Seen]]) -> nn.Module:
    """The model of a single process that takes the real samples of all ranks, step by step."""
    torch.manual_seed(config.run.seed)
    model = build_run_model(config, 10).train()
    step = make_step(model, lr=config.optim.lr)
    for batches in zip(*ranks, strict=True):
        real = [(seen, seen.weights > 0) for seen in batches]
        images = torch.from_numpy(np.concatenate([seen.images[good] for seen, good in real]))
        labels = torch.from_numpy(np.concatenate([seen.labels[good] for seen, good in real]))
        step(batch_of_images(images, labels), batches[0].step, None)
    return model


@pytest.mark.slow
def test_shadows_spoil_no_statistics(shards: Path, tmp_path: Path) -> None:
    """Batch norm: rank 1 of 2 has black images alone, and the model is that of rank 0 by itself."""
    one_shard = {"data__train": f"{shards}/small/part-003.tar", "data__samples": "31"}
    keys = {"model__name": "test_resnet", "run__length": "4 steps", **one_shard, **PLAIN_SGD}
    ranks = spawn(train_on, 2, recipe(shards, "small", **keys), tmp_path / "two")
    config = recipe(shards, "small", **keys, batch__size="4")
    alone = spawn(train_on, 1, config, tmp_path / "one")
    assert [step.ids for step in ranks[0]] == [step.ids for step in alone[0]]
    assert {id_ for step in ranks[1] for id_ in step.ids} == {-1}
    one, two = (load_file(newest(tmp_path / n) / "model.safetensors") for n in ("one", "two"))
    assert any(name.endswith("running_var") for name in one)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=5e-5)


def statistics_on(world: World, config: RunConfig, folder: Path) -> list[NDArray[np.float32]]:
    """This rank's batch norm statistics after each step."""
    torch.set_num_threads(1)
    seen: list[NDArray[np.float32]] = []

    def note(step: TrainStep, *_: Any) -> None:
        found = [b.flatten() for b in step.passes.model.buffers() if b.is_floating_point()]
        seen.append(torch.cat(found).numpy().copy())

    with hooked(after=note):
        train_joined(config, folder, world)
    return seen


@pytest.mark.slow
def test_a_rank_at_its_end_has_the_statistics_of_all(shards: Path, tmp_path: Path) -> None:
    """Rank 0 has no image left after half of the steps, and it alone saves."""
    keys = {"model__name": "test_resnet", "run__length": "1 epoch"}
    first, second = spawn(statistics_on, 2, recipe(shards, "small", **keys), tmp_path)
    assert len(first) == len(second) == 8
    for mine, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert not any(np.array_equal(*pair) for pair in pairwise(first))
    saved = load_file(newest(tmp_path) / "model.safetensors")
    kept = [saved[name].flatten() for name in saved if "running_" in name]
    np.testing.assert_array_equal(np.sort(torch.cat(kept)), np.sort(second[-1]))


# --- going on ---


class TwoRanks(NamedTuple):
    """Runs of two ranks, of two passes of 8 steps."""

    whole: Path
    killed: Path
    """After 13 updates, and the checkpoint of step 12: in the midst of a pass."""
    resumed: Path
    steps: list[int]
    """Steps that the first rank made after its restart."""


def go_on_in_the_midst_of_a_pass(world: World, shards: Path, folder: Path) -> list[int]:
    config = saving(shards)
    train_on(world, config, folder / "whole")
    with cut("killed in a step", 13), suppress(Killed):
        train_on(world, config, folder / "killed")
    if world.is_first:
        shutil.copytree(folder / "killed", folder / "resumed", symlinks=True)
    return [seen.step for seen in train_on(world, config, folder / "resumed")]


@pytest.fixture(scope="module")
def two_ranks(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    folder = tmp_path_factory.mktemp("two-ranks")
    steps = spawn(go_on_in_the_midst_of_a_pass, 2, shards, folder)[0]
    return TwoRanks(folder / "whole", folder / "killed", folder / "resumed", steps)


def saving(shards: Path) -> RunConfig:
    often = {"run__save_every": "6 steps", "run__eval_every": "9 steps"}
    return recipe(shards, "small", **often, model__drop_path="0.2", augment__mixup="0.2")


@pytest.mark.slow
def test_two_ranks_go_on_in_the_midst_of_a_pass(two_ranks: TwoRanks) -> None:
    """Weights, optimizer, evaluations, counts: the same, bit for bit."""
    assert progress(two_ranks.killed)["stream"]["ends"] == [8]
    assert two_ranks.steps == [12, 13, 14, 15]
    assert_same_end(two_ranks.resumed, two_ranks.whole, 16)
    passes = events(two_ranks.resumed, "pass")
    assert [event["seen"] for event in passes] == [45, 45]
    # Not 64 and 128, of 8 steps of 8: a rank had fewer images.
    assert [(event["samples"], event["epoch"]) for event in passes] == [(45, 1), (90, 2)]
    assert "data.samples = 64" in passes[0]["message"]


@pytest.mark.slow
def test_with_full_batches_as_samples_the_schedule_ends_with_the_run(
    shards: Path, tmp_path: Path
) -> None:
    """With 45 images, its last quarter ran at the lowest rate."""
    spawn(train_on, 2, recipe(shards, "small", data__samples="64"), tmp_path)
    rates = curve(tmp_path, "train", "lr")
    assert len({rate for (rate,) in rates.values()}) == len(rates) == 16
    messages = [event["message"] for event in events(tmp_path, "pass")]
    assert [message.count("data.samples") for message in messages] == [1, 1]  # without advice


@pytest.mark.slow
@pytest.mark.parametrize("size", tiered([1, 3], night=[1]))
def test_another_number_of_ranks_goes_on_between_passes(
    size: int, shards: Path, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(two_ranks.killed, tmp_path / "run", symlinks=True))
    assert set(spawn(code_of, size, saving(shards), folder)) == {"checkpoint.inside-pass"}
    for step in (9, 12):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    ranks = spawn(train_on, size, saving(shards), folder)
    assert {seen.step for seen in ranks[0]} == set(range(8, 8 + len(ranks[0])))
    (second,) = ids_by_pass(ranks, [len(ranks[0])])
    assert sorted(second) == ids_of(SMALL)


def test_a_checkpoint_of_another_order_is_no_place_in_a_stream(
    shards: Path, tmp_path: Path, capsys: Capture
) -> None:
    exact = ["--data.order", "exact", "--data.train", f"{shards}/small", "--run.length", "2 steps"]
    keys = [*words(shards), *exact]
    place = keys.index("--data.samples")
    shown(capsys, *keys[:place], *keys[place + 2 :], "--run", tmp_path / "exact")
    begin = ["--run.resume", newest(tmp_path / "exact"), "--run", tmp_path / "join", "--quiet"]
    check(refused(*words(shards), *begin), "checkpoint.not-of-join")


def train_on_poisoned(world: World, config: RunConfig, folder: Path) -> list[Seen]:
    """The first eight batches of the second pass give gradients that are not finite."""
    numbers = count()

    def spoil(_: TrainStep, batch: Any, step: int) -> None:
        if next(numbers) in range(12, 20):
            batch.images_BCHW.fill_(torch.nan)

    with hooked(before=spoil):
        return train_on(world, config, folder)


@pytest.mark.slow
def test_it_goes_back_and_the_data_runs_on(shards: Path, tmp_path: Path) -> None:
    """To the end of the first pass; what is left of the second is seen, once."""
    keys = {"batch__size": "4", "run__max_skipped": "5", "run__save_every": "5 steps"}
    (seen,) = spawn(train_on_poisoned, 1, recipe(shards, "small", **keys), tmp_path)
    first, second = ids_by_pass([seen], [12, 24])
    assert sorted(first) == sorted(second) == ids_of(SMALL)
    assert [batch.step for batch in seen] == [*range(20), *range(12, 16)]
    saved = progress(tmp_path)
    assert saved["stream"] == {"ranks": 1, "ends": [12, 24], "past": 90, "seen": 0}
    assert (saved["step"], saved["skipped"], saved["roll_backs"]) == (16, 8 * 4, 1)


# --- one rank, from a server and by the command line ---


def test_one_rank_from_a_plain_web_server(
    shards: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FaultyServer(shards / "small", has_ranges=False) as server:
        server.faults = ["", "", "cut"]
        remote = ["--data.train", f"{server.url}/part-{{000..003}}.tar"]
        shown(capsys, *words(shards), *remote, "--run", tmp_path / "remote")
    shown(capsys, *words(shards), "--run", tmp_path / "local")
    remote_weights, weights = (
        (newest(tmp_path / name) / "model.safetensors").read_bytes() for name in ("remote", "local")
    )
    assert remote_weights == weights
    assert [event["seen"] for event in events(tmp_path / "local", "pass")] == [45, 45]


def test_passes_repeat_until_so_many_steps(shards: Path, tmp_path: Path, capsys: Capture) -> None:
    shown(capsys, *words(shards, run__length="15 steps"), "--run", tmp_path)
    assert progress(tmp_path)["step"] == 15
    assert progress(tmp_path)["stream"] == {"ranks": 1, "ends": [6, 12], "past": 90, "seen": 24}
    messages = [event["message"] for event in events(tmp_path, "pass")]
    assert [message.count("data.samples") for message in messages] == [1, 1]  # without advice


def test_a_longer_pass_than_was_said(shards: Path, tmp_path: Path, capsys: Capture) -> None:
    """The run is over when the passes are, and the schedule waits at its end."""
    shown(capsys, *words(shards, data__samples="10"), "--run", tmp_path)
    assert progress(tmp_path)["step"] == 12
    rates = curve(tmp_path, "train", "lr")
    assert len({rate for step, (rate,) in rates.items() if step >= 3}) == 1


def test_bad_images_are_counted_and_named(shards: Path, tmp_path: Path, capsys: Capture) -> None:
    content = (shards / "small" / "part-003.tar").read_bytes()
    content = content.replace(b"\x89PNG", b"\x88PNG", 3)
    (tmp_path / "bad.tar").write_bytes(content)
    keys = words(shards, data__train=f"{tmp_path}/bad.tar", data__samples="31")
    check(refused(*keys, "--run", tmp_path / "run"), "data.too-many-bad-samples", num_samples=31)
    shown(capsys, *keys, "--data.max_bad", "0.2", "--run", tmp_path / "run2")
    lines = (tmp_path / "run2" / "quarantine.jsonl").read_text().splitlines()
    bad = [json.loads(line) for line in lines]
    assert {line["reason"] for line in bad} == {
        f"sample '3-{place:05d}': not an image" for place in range(3)
    }
    assert {line["file"] for line in bad} == {f"{tmp_path}/bad.tar"}


# --- what is saved where a rank dies ---


def test_ranks_have_agreed_before_a_step_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one that makes it knows where the run is, whoever has died since."""
    waited: list[bool] = []

    def all_reduce(message: torch.Tensor, **_: Any) -> Any:
        message += torch.tensor([1, 4])
        return SimpleNamespace(wait=lambda: waited.append(True))

    monkeypatch.setattr("trainyard.data.device.join.dist.all_reduce", all_reduce)
    course = build_course("1 epoch", epoch_samples=45, batch=8, image_size=16)
    place: dict[str, Any] = {}
    feed = JoinFeed(
        course,
        open_loader=lambda number, batches: nullcontext(Endless()),  # type: ignore[arg-type, return-value]
        open_feed=lambda batches, first: batches,  # type: ignore[arg-type, return-value]
        channels=3,
        resume_state=place,
        world=World(),
        report=lambda line: None,
    )
    feed.seek(0, 0)
    feed._world = World(size=2)
    next(feed)
    assert (len(waited), place["seen"]) == (1, 0)
    feed.is_over(1)
    assert (len(waited), place["seen"]) == (1, 4)


class Endless:
    def take(self) -> tuple[HostBatch, bool]:
        return _no_samples(16, 3), False


# --- what is wrong is named ---


def open_there(world: World, folder: Path, val: Path) -> str:
    """The code of the error where ranks see the folder `data` of another place."""
    os.chdir(folder / str(world.rank))
    config = DataConfig(train="data", val=str(val), order="join", samples=9)
    try:
        open_datasets(config, world, lambda *_: None)
    except TrainyardError as error:
        return error.code
    return ""


@pytest.mark.slow
def test_ranks_that_see_other_shards(shards: Path, tmp_path: Path) -> None:
    for rank, sizes in enumerate([(2, 2), (2, 2, 2)]):
        write_shards(tmp_path / str(rank) / "data", sizes)
    codes = spawn(open_there, 2, tmp_path, shards / "val")
    assert codes == ["rank.failed", "data.differs-between-nodes"]
    shutil.copy(tmp_path / "1/data/part-002.tar", tmp_path / "0/data")
    assert spawn(open_there, 2, tmp_path, shards / "val") == ["", ""]


def test_mistakes_are_told_before_validation_data_is_indexed() -> None:
    config = DataConfig(train="pipe:true", val="/nowhere", order="join")
    with raises("stream.samples-not-set"):
        open_datasets(config, World(), lambda *_: None)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"data__train": "pipe:false"}, "stream.pipe-failed"),
        ({"data__train": "pipe:true"}, "tar.truncated"),
        ({"data__train": "pipe:head -c 10240 /dev/zero"}, "stream.no-samples"),
        ({"data__order": "exact"}, "recipe.samples-without-join"),
        ({"data__val": "pipe:true"}, "recipe.pipe-without-join"),
        ({"data__locality": "5"}, "stream.needs-index"),
    ],
)
def test_mistakes(changes: dict[str, str], code: str, shards: Path, tmp_path: Path) -> None:
    check(refused(*words(shards, **changes), "--run", tmp_path / "run"), code)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("average.name", "gossip"),
        ("average.batch_norm", "sync"),
        ("schedule.batch_size", "1 epoch: 16"),
        ("run.bn_samples", "10"),
        ("run.length", "1.5 epochs"),
    ],
)
def test_keys_that_do_not_go_with_it(key: str, value: str, shards: Path) -> None:
    with raises("recipe.keys-conflict", other="data.order = 'join'") as caught:
        recipe(shards, "small", **{key.replace(".", "__"): value})
    assert key in str(caught.value.fields["setting"])


def test_a_pipe_without_join(shards: Path, tmp_path: Path) -> None:
    keys = words(shards, data__order="exact")
    place = keys.index("--data.samples")
    error = refused(*keys[:place], *keys[place + 2 :], "--run", tmp_path)
    check(error, "recipe.pipe-without-join", key="data.train")


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all(shards: Path, tmp_path: Path) -> None:
    config = recipe(shards, "small", data__train=f"pipe:cat '{shards}/small/part-00{{2..4}}.tar'")
    assert "stream.pipe-failed" in spawn(code_of, 2, config, tmp_path)
