"""Runs of several ranks that are cut off: as the same number they end alike, bit for bit.

Another number of ranks goes on with the same samples; replicas that differ, from their mean.
"""

import functools
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import Capture, newest, shown
from tests.cuts import CUTS, SIGNALS, Killed, cut, kill
from tests.runs import NUM_STEPS as NUM_PLAIN_STEPS
from tests.runs import (
    OPTIONS,
    RESNET,
    Seen,
    assert_equal,
    assert_same_end,
    curve,
    cut_off,
    events,
    hooked,
    interleaved,
    of_digits,
    train,
)
from tests.spawn import spawn, train_joined
from tests.tiers import tiered
from tests.training.test_resume_contract import RUNS, data
from tests.training.test_resume_contract import recipe as one_rank_recipe
from trainyard.config import RunConfig, load_recipe
from trainyard.data.index.merge import open_merged
from trainyard.data.order import training_plan
from trainyard.errors import PeerError
from trainyard.training.checkpoint import load_weights
from trainyard.training.step import TrainStep
from trainyard.world import World

pytestmark = pytest.mark.slow

__all__ = ["data"]  # a fixture

SIZE, NUM_STEPS = 2, 9
BASE = OPTIONS | {
    "model.ema_decay": "0.9",
    "run.length": f"{NUM_STEPS} steps",
    "run.save_every": "2 steps",
    "run.eval_every": "5 steps",
    "run.keep": "6",
}
PERIODIC = {"average.name": "periodic", "average.every": "3"}
ADAMW = {"optim.name": "adamw", "optim.lr": "0.001", "optim.clip_norm": "0.5"}
WAYS = {
    "all-reduce": RESNET,
    "gossip": RESNET | {"average.name": "gossip", "average.topology": "ring"},
    "DiLoCo": RESNET | PERIODIC | {"average.outer_lr": "0.7", "average.outer_momentum": "0.9"},
    "sharded": ADAMW | {"average.name": "sharded", "batch.micro": "8"},
}
DIFFER = ("gossip", "DiLoCo")
AT = (5, 4, 6, 6)
"""Updates before each of CUTS: in the midst of a period of three, and after its last one."""


def recipe(digits: Path, way: str, **options: str) -> RunConfig:
    return load_recipe("debug", BASE | of_digits(digits) | WAYS[way] | options)


# --- the table: averagers x cuts ---

Cell = tuple[str, str]
CELLS = [(way, kind) for way in WAYS for kind in CUTS]
DIAGONAL = list(zip(WAYS, CUTS, strict=True))


def fail(*_: object) -> None:
    raise OSError


def cut_and_go_on(world: World, digits: Path, folder: Path, cells: list[Cell]) -> None:
    """The whole run of each way, and for each cell one that is cut off and goes on.

    A signal goes to the last rank alone.
    """
    for way in sorted({way for way, _ in cells}):
        train(world, recipe(digits, way), folder / way / "whole")
    for way, kind in cells:
        is_spared = kind in SIGNALS and world.rank != world.size - 1
        end = fail if kind == "killed in a save" else kill
        ending = nullcontext() if is_spared else cut(kind, AT[CUTS.index(kind)], end)
        try:
            with ending:
                outcome = train_joined(recipe(digits, way), folder / way / kind, world)
                assert outcome.stopped is not None
        except (Killed, OSError, PeerError):
            assert kind not in SIGNALS
        train(world, recipe(digits, way), folder / way / kind)


@pytest.fixture(scope="module")
def runs_of(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """The folder of all runs of the diagonal, or of the others."""

    @functools.cache
    def made(is_diagonal: bool) -> Path:
        folder = tmp_path_factory.mktemp("ranks")
        cells = [cell for cell in CELLS if (cell in DIAGONAL) == is_diagonal]
        spawn(cut_and_go_on, SIZE, digits, folder, cells)
        return folder

    return made


@pytest.fixture(scope="module")
def wholes(runs_of: Callable[[bool], Path]) -> dict[str, Path]:
    """A run of each way that nothing happened to."""
    return {way: runs_of(True) / way / "whole" for way in WAYS}


@pytest.mark.parametrize(
    ("way", "kind"),
    [pytest.param(*c, marks=() if c in DIAGONAL else pytest.mark.night) for c in CELLS],
)
def test_a_run_that_is_cut_off_and_started_again_ends_alike(
    way: str, kind: str, runs_of: Callable[[bool], Path]
) -> None:
    """Of every replica too: weights, moments, statistics, average."""
    folder = runs_of((way, kind) in DIAGONAL) / way
    assert len(events(folder / kind, "resumed")) == 1
    assert not events(folder / kind, "replicas")
    assert_same_end(folder / kind, folder / "whole", NUM_STEPS)
    assert len(curve(folder / kind, "train", "loss")) == NUM_STEPS


# --- another number of ranks, another averager ---


def replicas_of(checkpoint: Path) -> list[Any]:
    paths = sorted((checkpoint / "replicas").glob("*.pt"))
    return [torch.load(path, weights_only=True)["averager"] for path in paths]


@pytest.mark.parametrize(
    ("way", "size"),
    tiered([("gossip", 3), ("DiLoCo", 3), ("sharded", 1)], night=[("gossip", 3), ("DiLoCo", 3)]),
)
def test_another_number_of_ranks_goes_on(
    way: str, size: int, wholes: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    """One rank of a sharded run takes all-reduce, whatever the recipe says."""
    folder = cut_off(wholes[way], tmp_path / "run", 4)
    spawn(train, size, recipe(digits, way), folder)
    assert newest(folder).name == f"step-{NUM_STEPS:08d}"
    assert len(events(folder, "replicas")) == (way in DIFFER)
    if way == "sharded":
        check_losses(folder, wholes[way])
        return
    states = replicas_of(newest(folder))
    assert len(states) == size
    assert_equal([state.get("anchor") for state in states], [states[0].get("anchor")] * size)


def check_losses(folder: Path, whole: Path, num_steps: int = NUM_STEPS) -> None:
    """The losses of a run are those of `whole`, which had another averager or number of ranks."""
    losses, expected = (curve(each, "train", "loss") for each in (folder, whole))
    assert losses and max(losses) == num_steps
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=1e-4)


def test_all_reduce_goes_on_from_a_sharded_run(
    wholes: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    """Its checkpoint is whole; the moments of channels_last weights have another layout."""
    path = wholes["sharded"] / "checkpoints" / "step-00000004"
    config = recipe(digits, "sharded", **{"average.name": "allreduce", "run.resume": str(path)})
    spawn(train, SIZE, config, tmp_path / "run")
    check_losses(tmp_path / "run", wholes["sharded"])


@pytest.mark.parametrize("way", ["gossip", "DiLoCo", "sharded"])
def test_what_is_evaluated_exported_and_best_is_the_mean(
    way: str, wholes: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    folder = wholes[way]
    states = replicas_of(newest(folder))
    assert bool(states) == (way in DIFFER)
    for name in ("", "ema") if states else ():
        replicas = [state["own"][name] for state in states]
        for key, mean in load_weights(newest(folder), name).items():
            if mean.is_floating_point():
                own = torch.stack([replica[key] for replica in replicas])
                torch.testing.assert_close(mean, own.mean(0))
        assert not torch.equal(*(replica["bn1.running_mean"] for replica in replicas))
    differs = ("consensus_distance",) if states else ()
    values = curve(folder, "val", "top1", "ema_top1", *differs)
    assert list(values) == [5, NUM_STEPS]
    for link in ("latest", "best"):
        path = (folder / "checkpoints" / link).resolve()
        found = json.loads(shown(capsys, "evaluate", path, "--json"))
        expected = values.get(int(path.name.removeprefix("step-")), values[NUM_STEPS])
        assert [found["top1"], found["ema_top1"]] == pytest.approx(expected[:2], abs=1e-9)
    shown(capsys, "export", folder, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").is_file()
    if way == "gossip":
        assert all(distance > 1e-3 for _, _, distance in values.values())


# --- the same stream of samples, whoever takes which share of it ---

PLAIN = "plain"
SHORT = {"run.eval_every": "0 steps"}
ORDERS: dict[str, dict[str, str]] = {
    PLAIN: SHORT,
    **{name: RUNS[name].keys | SHORT for name in ("locality", "resample", "weights")},
}
LAST = 13  # updates, after the checkpoint of step 10


def ids_of(world: World, config: RunConfig, folder: Path) -> Seen:
    """The ids that this rank updated with."""
    torch.set_num_threads(1)
    seen: Seen = []

    def note(_: TrainStep, batch: Any, step: int) -> None:
        seen.append((step, batch.ids.tolist()))

    with hooked(before=note), suppress(Killed):
        train_joined(config, folder, world)
    return seen


def killed_in_all_orders(world: World, data: Path, folder: Path) -> dict[str, Seen]:
    train(world, one_rank_recipe(data, SHORT), folder / "whole")
    found = {}
    for order, keys in ORDERS.items():
        with cut("killed in a step", LAST):
            found[order] = ids_of(world, one_rank_recipe(data, keys), folder / order)
    return found


def go_on_in_all_orders(world: World, data: Path, folder: Path) -> dict[str, Seen]:
    return {
        order: ids_of(world, one_rank_recipe(data, keys), folder / order)
        for order, keys in ORDERS.items()
    }


def expected_stream(config: RunConfig, start: int, end: int) -> dict[int, list[int]]:
    """The global batches of the plan, whoever takes which share of them."""
    train_data = config.data.train
    assert train_data is not None
    index = open_merged([train_data] if isinstance(train_data, str) else train_data, None)
    plan = training_plan(config.data, index, global_batch=config.batch.size, seed=config.run.seed)
    return {step: plan.batch(step).tolist() for step in range(start, end)}


@pytest.fixture(scope="module")
def two_killed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks in each order, killed; and a whole run."""
    folder = tmp_path_factory.mktemp("two-killed")
    ranks = spawn(killed_in_all_orders, SIZE, data, folder)
    for order, keys in ORDERS.items():
        found = interleaved([rank[order] for rank in ranks])
        assert found == expected_stream(one_rank_recipe(data, keys), 0, LAST)
    return folder


@pytest.mark.parametrize("size", tiered([1, 3], night=[1]))
def test_two_ranks_go_on_as_another_number(
    size: int, two_killed: Path, data: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(two_killed, tmp_path / "runs", symlinks=True))
    ranks = spawn(go_on_in_all_orders, size, data, folder)
    for order, keys in ORDERS.items():
        config = one_rank_recipe(data, keys)
        found = interleaved([rank[order] for rank in ranks])
        assert found == expected_stream(config, 10, NUM_PLAIN_STEPS), order
    check_losses(folder / PLAIN, two_killed / "whole", NUM_PLAIN_STEPS)
