"""Signals at any moment, under nohup and into pipes: nothing is lost that was said to be saved.

The recipe `digits` has batch norm, and saves by the clock. Whatever ends a run, the same command
ends it with the weights of an undisturbed one, bit for bit.
"""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.command_line import newest
from tests.runs import assert_equal, contents, events
from tests.test_cli_signals import Started, has_begun, wait_for
from tests.trials.counts import SEED, count_of

pytestmark = pytest.mark.night

KEYS = ("--run.length", "4 epochs", "--run.save_every", "1 second", "--run.eval_every", "1 epoch")
SIGNALS = [getattr(signal, f"SIG{name}") for name in ("KILL", "TERM", "INT", "HUP", "USR1")]
WAYS = ("alone", "nohup", "| tee", "| head")
CODES = {  # of the trial; 1 is that of a launcher or rank that lost another
    signal.SIGKILL: (-signal.SIGKILL, 137, 1),
    signal.SIGTERM: (130, -signal.SIGTERM),
    signal.SIGINT: (130, -signal.SIGINT),
    signal.SIGHUP: (130, -signal.SIGHUP),
    signal.SIGUSR1: (75, -signal.SIGUSR1),
}
DEFAULTS = ("env", "--default-signal")  # a job in the background ignores Ctrl-C, and so do its own
ENDS_S = 120


class Trial(NamedTuple):
    ranks: int
    way: str
    number: signal.Signals
    is_early: bool
    """While the ranks start; else after the first report."""
    moment_s: float


class Outcome(NamedTuple):
    code: int
    said: str


def trials() -> list[Trial]:
    """Every combination once before any comes again, in an order and at moments of TRIAL_SEED."""
    rng = random.Random(f"signals {SEED}")
    every = [*itertools.product((1, 2), WAYS, SIGNALS)]
    rng.shuffle(every)
    early = [rng.random() < 0.2 for _ in range(count_of("SIGNALS", 4))]
    return [Trial(*one, at, rng.uniform(0, 3)) for one, at in zip(itertools.cycle(every), early)]


def words(ranks: int, digits: Path, folder: Path) -> list[str]:
    what = ["train", "digits"] if ranks == 1 else ["launch", "local", "digits", "--ranks", "2"]
    command = [sys.executable, "-P", "-m", "trainyard", *what, "--data", str(digits)]
    return [*command, "--run", str(folder), *KEYS]


def disturbed(trial: Trial, digits: Path, folder: Path) -> Outcome:
    """The end of a command that gets a signal."""
    folder.mkdir()
    token = f"TRAINYARD_TRIAL={folder}"
    command = words(trial.ranks, digits, folder / "run")
    reader = {"| tee": ["tee", str(folder / "said")], "| head": ["head", "-n", "2"]}.get(trial.way)
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = subprocess.Popen(
            [*DEFAULTS, "nohup", *command] if trial.way == "nohup" else [*DEFAULTS, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if reader else out,
            stderr=err,
            env=os.environ | {"TRAINYARD_TRIAL": str(folder)},
            process_group=0,
        )
        beside = None
        if reader:  # of the same job, so that Ctrl-C and a closed terminal reach it too
            beside = subprocess.Popen(
                reader, stdin=process.stdout, stdout=out, process_group=process.pid
            )
            assert process.stdout is not None
            process.stdout.close()
        started = Started(process, token + "\0")  # type: ignore[arg-type]
        try:
            if not trial.is_early:
                wait_for(lambda: has_begun(folder / "run"), "the first report", ENDS_S)
            with suppress(subprocess.TimeoutExpired):
                process.wait(trial.moment_s)
            if process.poll() is None:
                send(trial, started)
            code = process.wait(ENDS_S)
            if beside:
                beside.wait(ENDS_S)
            wait_for(lambda: not started.members(), "the last process to end")
        finally:
            for pid in started.members():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return Outcome(code, "".join((folder / name).read_text() for name in ("out", "err")))


def send(trial: Trial, started: Started) -> None:
    """A terminal signals the whole job, a person a process, and lack of memory kills any."""
    if trial.number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(started.process.pid, trial.number)
    elif trial.number == signal.SIGKILL:
        with suppress(ProcessLookupError):
            os.kill(random.Random(trial.moment_s).choice(started.members()), trial.number)
    else:
        started.process.send_signal(trial.number)


def check_word(trial: Trial, outcome: Outcome, folder: Path, last: str) -> str:
    """Words that say so mean a checkpoint, and 0 means the end, which a late signal follows."""
    saved = sorted(path.name for path in folder.glob("run/checkpoints/step-*"))
    if outcome.code == 0 or last in saved:
        assert last in saved, f"0, and not at its end; see {folder}"
        return "finished"
    assert outcome.code in CODES[trial.number], f"{outcome.code}; see {folder}"
    if trial.number != signal.SIGINT and trial.ranks == 1:  # whose code in a shell is 130 too
        assert saved or outcome.code not in (130, 75), f"{outcome.code}, and nothing is saved"
    stops = re.findall(r"stopped at step ([\d,]+)", outcome.said)
    promised = {f"step-{int(step.replace(',', '')):08d}" for step in stops}
    if outcome.code in (130, 75) and not saved:  # of a launcher: nothing had been trained
        assert not (folder / "run" / "metrics.jsonl").exists(), f"{outcome.code}, nothing saved"
    promised |= set(re.findall(r"the same command resumes from (step-\d+)", outcome.said))
    assert promised <= set(saved), f"{promised - set(saved)} is said to be saved; see {folder}"
    if promised:
        return "saved as said"
    at_start = not (folder / "run" / "metrics.jsonl").exists()
    is_unread = trial.way in WAYS[2:]  # the reader has got the signal too, or has ended
    assert trial.number == signal.SIGKILL or is_unread or at_start, f"see {folder}"
    return "nothing said"


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs that nothing happened to, by their number of ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for ranks in (1, 2):
        subprocess.run(words(ranks, digits, folder / f"{ranks}"), check=True, capture_output=True)
    return {ranks: folder / f"{ranks}" for ranks in (1, 2)}


@pytest.mark.timeout(0)
def test_signals_at_any_moment(
    undisturbed: dict[int, Path],
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = []
    for number, trial in enumerate(trials()):
        folder, begun = tmp_path / str(number), time.monotonic()
        whole = newest(undisturbed[trial.ranks])
        try:
            outcome = disturbed(trial, digits, folder)
            came = f"{outcome.code:4d} {check_word(trial, outcome, folder, whole.name)}"
            again = words(trial.ranks, digits, folder / "run")
            done = subprocess.run(again, capture_output=True, text=True, timeout=4 * ENDS_S)
            assert done.returncode == 0, done.stderr
            assert_equal(contents(newest(folder / "run")), contents(whole))
            resumed = [event["step"] for event in events(folder / "run", "resumed")]
            came += f", went on at {resumed[-1]}, equal" if resumed else ", equal"
        except AssertionError as error:
            failed.append(trial)
            came = f"FAILED: {error}".partition("\n")[0]
        with capsys.disabled():
            moment = f"{'start' if trial.is_early else 'step'} + {trial.moment_s:.1f} s"
            took = f"{time.monotonic() - begun:.0f} s"
            row = (number, trial.ranks, trial.way, trial.number.name, moment, came, took)
            print(
                f"\n{' | '.join(map(str, row))}",
                end="",
                flush=True,
            )
    assert not failed
