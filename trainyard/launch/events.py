"""What a launcher hears of its hosts and ranks, and by signals, in one queue."""

import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from trainyard.errors import Requeued, Stopped
from trainyard.launch.ends import REQUEUE_SIGNALS
from trainyard.launch.signals import handling

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *REQUEUE_SIGNALS)


@dataclass(frozen=True)
class Line:
    """That a rank wrote."""

    rank: int
    text: str
    is_error: bool = False


@dataclass(frozen=True)
class End:
    rank: int
    code: int
    """Its exit code, or minus the signal that killed it."""


@dataclass(frozen=True)
class Gone:
    """A host that is no longer reached, whatever has become of its ranks."""

    host: str
    why: str


@dataclass(frozen=True)
class Signal:
    """That this process got."""

    number: int


@dataclass(frozen=True)
class Answer:
    """A host's, to what a launcher asked it outside of attempts."""

    host: str
    value: Any


Event = Line | End | Gone | Signal | Answer
Events = queue.SimpleQueue[Event]


def event_of(message: Any, host: str) -> Event | None:
    """What the agent of a host tells (see agent.py); None if it is about the agent alone."""
    match message:
        case {"is": "line", "rank": rank, "text": text, "is_error": is_error}:
            return Line(rank, text, is_error)
        case {"is": "end", "rank": rank, "code": code}:
            return End(rank, code)
        case {"is": "answer", "value": value} | {"is": "hello", "facts": value}:
            return Answer(host, value)
    return None


@contextmanager
def passing_signals(events: Events) -> Iterator[None]:
    """Inside, signals that end a run are events, in place of what they do else."""

    def note(number: int, frame: FrameType | None) -> None:
        events.put(Signal(number))

    with handling(_SIGNALS, note):
        yield


def stopped_by(number: int) -> Stopped:
    """The error to end with after a signal, where there are no ranks to tell."""
    kind = Requeued if number in REQUEUE_SIGNALS else Stopped
    return kind(f"stopped by {signal.Signals(number).name}")
