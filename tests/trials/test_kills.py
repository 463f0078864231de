"""kill -9 at any moment, the same command again: the same weights, every sample once."""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run
from tests.runs import NUM_STEPS, OPTIONS, assert_same_end, events, on_each_step, words
from tests.spawn import _launched, _ranks
from tests.trials.counts import SEED, count_of
from trainyard.data.sampler.plan import ShuffledPlan
from trainyard.training.step import TrainStep
from trainyard.world import World

pytestmark = pytest.mark.night

SAVE_EVERY = int(OPTIONS["run.save_every"].split()[0])
ENDS_S = 120  # within which the other rank has to end as well


def train(world: World, arguments: list[str], notes: Path) -> None:
    """`trainyard train`, which notes the samples of each step as it is made."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(notes / f"said-{world.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)

    def note(_: TrainStep, batch: Any, step: int) -> None:
        with open(notes / f"ids-{world.rank}.jsonl", "a") as file:
            file.write(json.dumps([step, batch.ids.tolist()]) + "\n")

    on_each_step(before=note)
    raise SystemExit(run(*arguments))


def ends(
    arguments: list[str], folder: Path, size: int, kill: random.Random | None = None
) -> list[int]:
    """The exit codes of ranks that train, one of which is killed at some moment, if at all."""
    folder.mkdir(exist_ok=True)
    with _ranks(_launched, size, train, (arguments, folder)) as ranks:
        if kill is not None:
            wait_for_a_moment(kill, folder / "ids-0.jsonl", ranks[0])
            kill.choice(ranks).kill()
        for process in ranks:
            process.join(timeout=ENDS_S)
        codes: list[int | None] = [process.exitcode for process in ranks]
    assert None not in codes, f"{codes}: a rank hangs; see {folder}"
    return [code for code in codes if code is not None]


def wait_for_a_moment(rng: random.Random, notes: Path, process: Any) -> None:
    """In a fifth of the cases while ranks start, else in or after some step."""
    if rng.random() < 0.2:
        time.sleep(rng.uniform(0, 3))
        return
    step = rng.randrange(NUM_STEPS)
    while process.is_alive() and not (notes.exists() and notes.read_text().count("\n") > step):
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.1))


def last_step(folder: Path) -> int:
    """The step, counted from 0, that the first rank was making when it ended; 0 before any."""
    notes = folder / "ids-0.jsonl"
    lines = notes.read_text().splitlines() if notes.exists() else []
    return int(json.loads(lines[-1])[0]) if lines else 0


def assert_every_sample_once(folder: Path, size: int) -> None:
    """Each step has the samples of the plan, however often it was made."""
    plan = ShuffledPlan(1433, 64, seed=0)
    for rank in range(size):
        notes = (folder / f"ids-{rank}.jsonl").read_text().splitlines()
        seen = [json.loads(note) for note in notes]
        assert {step for step, _ in seen} == set(range(NUM_STEPS))
        for step, ids in seen:
            assert ids == plan.batch(step)[rank::size].tolist()


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def size(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def undisturbed(size: int, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert ends(words(digits, folder / "run"), folder, size) == [0] * size
    return folder / "run"


@pytest.mark.timeout(0)
def test_killed_at_any_moment(size: int, undisturbed: Path, digits: Path, tmp_path: Path) -> None:
    wanted = count_of("KILLS", 2) if size == 1 else count_of("RANK_KILLS", 1)
    rng, came_of_it, lost = random.Random(f"{SEED} {size}"), Counter[str](), Counter[int]()
    number = 0
    while came_of_it.total() < wanted:
        folder, number = tmp_path / str(number), number + 1
        arguments = words(digits, folder / "run")
        codes = ends(arguments, folder, size, rng)
        if -signal.SIGKILL not in codes:  # it was over before
            continue
        reached = last_step(folder)
        assert ends(arguments, folder, size) == [0] * size, f"see {folder}"
        assert_same_end(folder / "run", undisturbed)
        assert_every_sample_once(folder, size)
        steps = [event["step"] for event in events(folder / "run", "resumed")]
        came_of_it[f"resumed at {steps[0]}" if steps else "from the beginning"] += 1
        lost[reached - (steps[0] if steps else 0)] += 1
        # The save before the last one was complete when the last one began.
        assert max(lost) <= 2 * SAVE_EVERY
    print(f"\n{wanted} kills with {size} ranks, all ended alike: {dict(came_of_it)}")
    print(f"steps that were made again: {dict(sorted(lost.items()))}")
