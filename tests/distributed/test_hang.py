"""A rank makes no progress: it is found, named and ended; the others save; a restart goes on."""

import ctypes
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.command_line import newest, run
from tests.distributed.test_losses import said, words_of
from tests.launch.test_local import check_reports, process_of
from tests.spawn import launch
from tests.test_cli_signals import Started, has_begun, has_saved, started, wait_for
from tests.tiers import tiered
from trainyard.command_line import end
from trainyard.data.device.feed import TrainingFeed
from trainyard.distributed import heartbeat, watchdog
from trainyard.distributed.heartbeat import Activity, hanging
from trainyard.distributed.process_info import ProcessInfo
from trainyard.distributed.stacks import DUMP, Stacks
from trainyard.monitor.quarantine import Quarantine
from trainyard.training import saver
from trainyard.training.checkpoint import find_problem
from trainyard.training.saver import Saver
from trainyard.training.step import TrainStep
from trainyard.world import World

pytestmark = pytest.mark.slow

SIZE, VICTIM = 3, 1
SAVES = 2  # ranks, of which the first saves
AT = 4  # the step, counted from 0, in which a rank hangs
LIMIT_S, FRESH_S = 5, 3
BEGINNING = 20  # times the limit: on a busy machine imports take long
TOKEN = "TRAINYARD_TEST"


# --- who hangs ---


def seen(step: int, doing: str = "step", silent_s: float = 61) -> Activity:
    return Activity(step, doing, silent_s, 60)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("activities", "silent", "expected"),
    [
        ([seen(7), seen(7, "data", 59)], [], None),
        ([seen(7, silent_s=59), seen(7, "data")], [], [1]),
        ([seen(7), seen(6, "eval"), seen(7)], [], [1]),
        ([seen(7), seen(7), seen(6, "save")], [], [2]),
        ([seen(7), seen(7, "data"), seen(7, "data")], [], [1, 2]),
        # All wait for each other, or one hangs in the step itself: its stacks show which.
        ([seen(7), seen(7)], [], []),
        ([seen(7), seen(7, silent_s=59)], [], None),
        ([seen(8, "eval"), seen(8, "eval")], [], []),
        # Replicas that do not wait in every step.
        ([seen(9), seen(8)], [], [1]),
        # One that others wait for makes progress, or its limit is another.
        ([seen(7), seen(6, "save", 5)], [], None),
        ([seen(7), seen(6, "save")._replace(limit_s=600)], [], None),
        ([seen(7), seen(8)], [1], [1]),
        ([seen(7, silent_s=9), seen(7, silent_s=20)], [1], None),
        ([seen(7)], [], [0]),
        ([seen(7, silent_s=59)], [], None),
        ([seen(7)._replace(limit_s=0), seen(7)], [], None),
    ],
)
def test_who_hangs(
    activities: list[Activity], silent: list[int], expected: list[int] | None
) -> None:
    assert hanging(dict(enumerate(activities)), set(silent)) == expected


@pytest.mark.quick
@pytest.mark.parametrize("doing", ["save", "roll back"])
def test_what_waits_for_a_disk_has_a_limit_of_its_own(doing: str) -> None:
    beat = heartbeat.Heartbeat()
    beat.limit_s, beat.limits_of = 60, {"save": 600, "roll back": 600}
    for step in (1, 2):
        beat.mark("data", step)
    beat.mark(doing, 2)
    beat.clock_s += 599
    assert not beat.activity().is_overdue
    beat.clock_s += 2
    assert beat.activity().is_overdue
    beat.mark("step", 3)
    beat.clock_s += 61
    assert beat.activity().is_overdue
    beat.limit_s = 0  # nothing is watched
    beat.mark(doing, 3)
    beat.clock_s += 601
    assert not beat.activity().is_overdue


@pytest.mark.quick
def test_stacks_are_written_while_threads_begin_and_end(tmp_path: Path) -> None:
    """A reader of stacks without Python's lock crashes the process here."""
    is_over = threading.Event()

    def begin_others() -> None:
        while not is_over.wait(0.001):
            each = threading.Thread(target=time.sleep, args=[0.001])
            each.start()
            each.join()

    beginners = [threading.Thread(target=begin_others, name=f"beginner-{n}") for n in range(4)]
    stacks = Stacks(tmp_path, 0)
    for thread in beginners:
        thread.start()
    for _ in range(200):
        stacks.write()
        time.sleep(0.002)
    is_over.set()
    for thread in beginners:
        thread.join()
    stacks.close()
    assert "Thread beginner-3 (most recent call first):" in stacks.path.read_text()


# --- in training ---


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def hold_the_lock() -> None:
    time.sleep(LIMIT_S / 2)  # for its watchdog to see that it has begun
    ctypes.PyDLL(None).sleep(1000)


def be_stopped() -> None:
    time.sleep(LIMIT_S / 2)  # for its watchdog to post what it does
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_a_while() -> None:
    time.sleep(LIMIT_S * 0.6)


def sleep_long() -> None:
    time.sleep(LIMIT_S * 3)


def before(kind: Any, name: str, deed: Callable[[], None]) -> None:
    """Do something before each call of a method."""
    method = getattr(kind, name)

    def changed(self: Any, *arguments: Any) -> Any:
        deed()
        return method(self, *arguments)

    setattr(kind, name, changed)


def train(
    world: World,
    folder: Path,
    words: list[str],
    where: str = "",
    deed: Callable[[], None] = sleep_for_ever,
    victim: int = VICTIM,
) -> None:
    """`trainyard train`, in which the victim does something from its step AT on."""
    os.environ[TOKEN] = str(folder)
    vars(watchdog)["FRESH_S"] = FRESH_S
    vars(heartbeat)["BEGINNING"] = BEGINNING
    note_verdicts(folder)
    os.dup2(os.open(folder.with_name(f"said-{world.rank}"), os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    calls = 0

    def do() -> None:
        nonlocal calls
        calls += 1
        if calls > AT:
            deed()

    if where and world.rank == min(victim, world.size - 1):
        before(*PLACES[where], do)
    end(run(*words))


def save_after(world: World, folder: Path, words: list[str], deed: Callable[[], None]) -> None:
    """`trainyard train`, in which the first rank does something before it writes a checkpoint."""

    def slow(*arguments: Any) -> Any:
        if world.is_first:
            deed()
        return write(*arguments)

    write, vars(saver)["write_files"] = vars(saver)["write_files"], slow
    train(world, folder, words)


PLACES = {
    "step": (TrainStep, "__call__"),
    "data": (TrainingFeed, "__next__"),
    "save": (Saver, "save"),
}


def words_with_limit(digits: Path, folder: Path, **average: str) -> list[str]:
    return [*words_of(digits, folder, **average), "--run.hang_timeout", f"{LIMIT_S}"]


def left_behind(folder: Path) -> list[int]:
    return Started(None, f"{TOKEN}={folder}\0").members()  # type: ignore[arg-type]


def note_verdicts(folder: Path) -> None:
    """Write down whom this process blames, beside the sentence that it makes of that."""
    described: Callable[..., str] = vars(watchdog)["described"]

    def noted(
        ranks: list[int], names: Any, activities: dict[int, Activity], silent: set[int]
    ) -> str:
        seen = [activities[rank] for rank in ranks or [0]]
        verdict = {
            "kind": "silent" if silent & {*ranks} else "no progress",
            "ranks": ranks,
            "step": seen[0].step,
            "doing": seen[0].doing,
            "silent_s": seen[0].silent_s,
        }
        folder.with_name(f"verdict-{os.getpid()}").write_text(json.dumps(verdict))
        return described(ranks, names, activities, silent)

    vars(watchdog)["described"] = noted


class Verdict(NamedTuple):
    kind: str
    ranks: list[int]
    step: int
    doing: str
    silent_s: float


def verdict_of(folder: Path) -> Verdict:
    """Whom the ranks blamed, all of them the same."""
    found = [json.loads(path.read_text()) for path in folder.parent.glob("verdict-*")]
    verdicts = [Verdict(**each) for each in found]
    assert verdicts and all(each.ranks == verdicts[0].ranks for each in verdicts)
    return verdicts[0]


def check_hang(folder: Path, size: int = SIZE) -> Verdict:
    """All end, one of them with a line that names stacks and the checkpoint to resume from."""
    wait_for(lambda: not left_behind(folder), "all processes to end")
    (message,) = [line for rank in range(size) for line in said(folder, rank)]
    assert str(folder / "stacks") in message and newest(folder).name in message
    for rank in range(size):
        written = (folder / "stacks" / f"rank-{rank:05d}.txt").read_text()
        assert "most recent call first" in written
    report = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (report["event"], report["message"]) == ("rank hangs", message)
    assert find_problem(newest(folder)) is None
    verdict = verdict_of(folder)
    assert verdict.silent_s >= LIMIT_S
    return verdict


SAVED = 3


@pytest.mark.parametrize(
    ("where", "deed", "kind", "ranks", "code"),
    [
        pytest.param("data", sleep_for_ever, "no progress", [VICTIM], 1, id="in data loading"),
        # Where all wait, each may be the cause.
        pytest.param(
            *("step", sleep_for_ever, "no progress", [], 1),
            id="in a step",
            marks=pytest.mark.night,
        ),
        pytest.param("step", hold_the_lock, "silent", [VICTIM], -DUMP, id="with the lock"),
    ],
)
def test_a_rank_that_hangs_ends_the_run(
    where: str,
    deed: Callable[[], None],
    kind: str,
    ranks: list[int],
    code: int,
    digits: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    words = words_with_limit(digits, folder)
    assert launch(train, SIZE, folder, words, where, deed) == [1, code, 1]
    verdict = check_hang(folder)
    assert (verdict.kind, verdict.ranks) == (kind, ranks)
    if kind == "no progress":
        assert (verdict.step, verdict.doing) == (AT + 1, where)
    assert newest(folder).name == f"step-{SAVED:08d}"


def hang_and_save(world: World, folder: Path, words: list[str]) -> None:
    """`trainyard train`, in which the first rank hangs while it writes a checkpoint for long."""
    write = vars(saver)["write_files"]

    def slow(*arguments: Any) -> Any:
        time.sleep(LIMIT_S * 2)
        return write(*arguments)

    vars(saver)["write_files"] = slow
    train(world, folder, words, "data", sleep_for_ever, victim=0)


@pytest.mark.parametrize("size", tiered([1, 2], night=[2]))
def test_a_rank_that_hangs_completes_its_checkpoint(
    size: int, digits: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert launch(hang_and_save, size, folder, words_with_limit(digits, folder)) == [1] * size
    (message,) = [line for rank in range(size) for line in said(folder, rank)]
    assert f"step-{SAVED:08d}" in message
    assert find_problem(newest(folder)) is None


@pytest.mark.night
def test_a_slow_save_is_no_hang(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*words_with_limit(digits, folder), "--run.save_every", "0 steps"]
    assert launch(save_after, SAVES, folder, words, sleep_long) == [0] * SAVES
    assert [line for rank in range(SAVES) for line in said(folder, rank)] == []
    assert find_problem(newest(folder)) is None


@pytest.mark.night
def test_a_save_has_a_limit_of_its_own(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*words_with_limit(digits, folder), "--run.save_every", "0 steps"]
    words += ["--run.max_save", f"{2 * LIMIT_S}"]
    assert launch(save_after, SAVES, folder, words, sleep_for_ever) == [1] * SAVES
    verdict = verdict_of(folder)
    assert verdict[:4] == ("no progress", [], 8, "save")
    assert verdict.silent_s >= 2 * LIMIT_S


@pytest.mark.night
def test_a_rank_that_is_stopped_in_a_save_has_the_usual_limit(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*words_with_limit(digits, folder), "--run.save_every", "1 step"]
    assert launch(train, SIZE, folder, words, "save", be_stopped) == [1, -DUMP, 1]
    verdict = check_hang(folder)
    assert (verdict.kind, verdict.ranks) == ("silent", [VICTIM])
    assert newest(folder).name == f"step-{AT:08d}"


def test_the_first_rank_is_found_though_its_store_is_stopped_too(
    digits: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = [*words_with_limit(digits, folder), "--run.save_every", "1 step"]
    ends = launch(train, SIZE, folder, words, "save", be_stopped, 0)
    assert ends == [-DUMP, *[1] * (SIZE - 1)]
    verdict = verdict_of(folder)
    assert (verdict.kind, verdict.ranks) == ("silent", [0])
    assert [len(said(folder, rank)) for rank in (1, 2)] == [1, 0]
    wait_for(lambda: not left_behind(folder), "all processes to end")


@pytest.mark.night
def test_a_slow_rank_is_not_accused(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = words_with_limit(digits, folder)
    assert launch(train, SIZE, folder, words, "step", sleep_a_while) == [0] * SIZE
    assert [line for rank in range(SIZE) for line in said(folder, rank)] == []
    assert not (folder / "stacks").exists()


def test_a_world_of_one_hangs_too(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = words_with_limit(digits, folder)
    assert launch(train, 1, folder, words, "step", sleep_for_ever) == [1]
    assert check_hang(folder, size=1)[:4] == ("no progress", [0], AT + 1, "step")
    assert newest(folder).name == f"step-{SAVED:08d}"


@pytest.mark.night
def test_a_run_goes_on_after_a_rank_was_stopped(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["--data", digits, "--run", folder, "--ranks", 2, "--restarts", 1, "--data.threads", 1]
    words += ["--batch.size", 8, "--run.length", "60 steps", "--run.save_every", "2 steps"]
    words += ["--run.log_every", "1 step", "--run.hang_timeout", LIMIT_S]
    with started(tmp_path, "launch", "local", "debug", *words) as command:
        wait_for(lambda: has_saved(folder), "the first checkpoint")
        os.kill(process_of(command, 1), signal.SIGSTOP)
        _, err = command.process.communicate(timeout=100)
        assert command.members() == []
    assert command.process.returncode == 0
    assert len(re.findall(r"step-\d+", err)) == 1
    check_reports(folder, num_steps=60)
    assert newest(folder).name == "step-00000060"


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.night
def test_a_suspended_run_goes_on(digits: Path, tmp_path: Path) -> None:
    """However long: Ctrl-Z on a launcher, and schedulers, stop processes so."""
    folder = tmp_path / "run"
    words = ["--data", digits, "--run", folder, "--ranks", 2, "--data.threads", 1]
    words += ["--batch.size", 8, "--run.length", "60 steps", "--run.log_every", "1 step"]
    words += ["--run.save_every", "20 steps", "--run.hang_timeout", LIMIT_S]
    with started(tmp_path, "launch", "local", "debug", *words) as command:
        wait_for(lambda: has_begun(folder), "the first report")
        ranks = [process_of(command, rank) for rank in (1, 0)]
        for rank in ranks:  # the second waits for the first
            os.kill(rank, signal.SIGSTOP)
            wait_for(partial(is_stopped, rank), "the rank to stop", timeout_s=5)
            time.sleep(1)
        time.sleep(2 * LIMIT_S)
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
        _, err = command.process.communicate(timeout=100)
    assert (command.process.returncode, err) == (0, "")
    check_reports(folder, num_steps=60)


class Gone:
    """A store whose process has ended."""

    def set(self, *_: Any) -> None:
        raise RuntimeError

    compare_set = check = set


def hang_without_a_store(_: World, said: Path) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    store: Any = Gone()
    processes = dict.fromkeys(range(2), ProcessInfo.current())
    watchdog.Watchdog(store, World(1, 2), processes, is_hosted=True).begin(0.1)
    time.sleep(30)
    os._exit(0)


def test_a_rank_that_hangs_without_a_store_ends_itself(tmp_path: Path) -> None:
    """The store was the agent's of a launcher: nobody judged any rank but the first."""
    assert launch(hang_without_a_store, 1, tmp_path / "said") == [1]
    assert (tmp_path / "said").read_text().startswith("trainyard: rank 1 (")


# --- a stop, while something takes long ---


def stop_in_evaluation(world: World, folder: Path, words: list[str]) -> None:
    """`trainyard train`, in which one rank is told to stop at the second batch of an evaluation."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    batches = 0

    def note(self: Any, split: str, bad: Any) -> None:
        nonlocal batches
        batches += split == "val"
        if batches == 2 and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        method(self, split, bad)

    method, Quarantine.note = Quarantine.note, note  # type: ignore[method-assign]
    code = run(*words)
    folder.with_name(f"batches-{world.rank}").write_text(f"{batches}")
    end(code)


@pytest.mark.parametrize("size", tiered([1, 2], night=[1]))
def test_an_evaluation_that_is_cut_off_is_made_up_for(
    size: int, digits: Path, tmp_path: Path
) -> None:
    folder, at = tmp_path / "run", "4 steps"
    words = [*words_of(digits, folder), "--run.eval_every", at, "--run.length", "6 steps"]
    assert launch(stop_in_evaluation, size, folder, words) == [75] * size
    for rank in range(size):
        assert folder.with_name(f"batches-{rank}").read_text() in "234"
    assert newest(folder).name == "step-00000004"
    assert not evaluations(folder)
    assert launch(train, size, folder, words) == [0] * size
    assert evaluations(folder) == [4, 6]


def evaluations(folder: Path) -> list[int]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == "val"]


def test_a_stop_does_not_wait_for_data_that_does_not_come(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    timer = signal.setitimer  # of the time that a stop waits for data
    monkeypatch.setattr(signal, "setitimer", lambda which, *s: timer(which, *(n / 50 for n in s)))
    fetch, calls = TrainingFeed.__next__, 0

    def fetch_or_wait(self: TrainingFeed) -> Any:
        nonlocal calls
        calls += 1
        if calls > AT:
            os.kill(os.getpid(), signal.SIGTERM)
            sleep_for_ever()
        return fetch(self)

    monkeypatch.setattr(TrainingFeed, "__next__", fetch_or_wait)
    assert run(*words_of(digits, folder)) == 130
    assert newest(folder).name == f"step-{AT:08d}"
    monkeypatch.undo()
    assert run(*words_of(digits, folder)) == 0
    assert newest(folder).name == "step-00000008"
