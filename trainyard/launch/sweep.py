"""Runs of this machine, one after another or one a GPU, as processes of `trainyard train`."""

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import NamedTuple

from trainyard.errors import STOPS, Stopped
from trainyard.files import RunDirectory
from trainyard.launch.exit_codes import meaning_of
from trainyard.launch.job import Job
from trainyard.launch.signals import handling, next_event
from trainyard.parent import FIRST_RUN, LAUNCHER

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOOK_S = 0.5


class End(NamedTuple):
    """The end of a run."""

    number: int
    """The number of its job."""
    code: int
    """As a shell reports it."""


def gpus(count: int) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get(_VISIBLE)
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def run_jobs(
    jobs: Sequence[Job],
    devices: Sequence[str],
    *,
    is_quiet: bool,
    on_start: Callable[[int], None],
    on_end: Callable[[End], None],
    is_enough: Callable[[int], bool] | None = None,
) -> int | None:
    """Run jobs, as many at a time as there are `devices`: GPUs, or one that is "", for any.

    With several, each job has an equal share of the cores too. `is_quiet`: nothing of the jobs'
    stdout is shown. A job that `is_enough` is told to save and stop, and its code is 0. A signal
    that ends a run goes to the jobs, which save; no further one starts. Returns its number or None.
    """
    events: queue.SimpleQueue[End | int] = queue.SimpleQueue()
    running: dict[int, tuple[subprocess.Popen[bytes], str]] = {}
    waiting, free = list(range(len(jobs))), list(devices)
    received: int | None = None

    def note(number: int, frame: FrameType | None) -> None:
        events.put(number)

    with handling(STOPS, note):
        while running or (waiting and received is None):
            while waiting and free and received is None:
                number, device = waiting.pop(0), free.pop(0)
                on_start(number)
                first = str(RunDirectory(jobs[0].run).metrics) if number else ""
                process = _start(jobs[number], device, devices, first=first, is_quiet=is_quiet)
                running[number] = process, device
                end = partial(_await, process, number, events, is_enough)
                threading.Thread(target=end, daemon=True).start()
            event = next_event(events)
            if isinstance(event, int):
                received = event
                for process, _ in running.values():
                    process.send_signal(event)
                continue
            free.append(running.pop(event.number)[1])
            on_end(event)
    return received


def _start(
    job: Job, device: str, devices: Sequence[str], *, first: str, is_quiet: bool
) -> "subprocess.Popen[bytes]":
    environment = os.environ | {LAUNCHER: str(os.getpid())}
    environment |= {_VISIBLE: device} if device else {}
    environment |= {FIRST_RUN: first} if first else {}
    process = subprocess.Popen(
        job.command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if is_quiet else None,
    )
    if len(devices) > 1:
        _give_cores(process, devices.index(device), len(devices))
    return process


def _give_cores(process: "subprocess.Popen[bytes]", slot: int, count: int) -> None:
    """Leave a new process every `count`-th core from the `slot`-th on, if there are enough."""
    cores = sorted(os.sched_getaffinity(0))[slot::count]
    with suppress(ProcessLookupError):  # it has ended already
        os.sched_setaffinity(process.pid, cores or os.sched_getaffinity(0))


def _await(
    process: "subprocess.Popen[bytes]",
    number: int,
    events: "queue.SimpleQueue[End | int]",
    is_enough: Callable[[int], bool] | None,
) -> None:
    is_told = False
    while is_enough and not is_told and process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)
        if process.returncode is None and is_enough(number):
            process.send_signal(signal.SIGTERM)
            is_told = True
    code = meaning_of(process.wait())
    events.put(End(number, 0 if is_told and code == Stopped.exit_code else code))
