"""Events of hosts, ranks and signals, in one queue of a launcher."""

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
    """A line of output of a rank."""

    rank: int
    text: str
    is_error: bool = False


@dataclass(frozen=True)
class End:
    rank: int
    code: int
    """Exit code, or minus the signal that killed the rank."""


@dataclass(frozen=True)
class Gone:
    """A host that is no longer reached; its ranks may or may not run."""

    host: str
    why: str


@dataclass(frozen=True)
class Signal:
    """A signal that this process received."""

    number: int


@dataclass(frozen=True)
class Answer:
    """A host's answer to a question that the launcher asked outside of attempts."""

    host: str
    value: Any


Event = Line | End | Gone | Signal | Answer
Events = queue.SimpleQueue[Event]


def event_of(message: Any, host: str) -> Event | None:
    """The event in an agent's message (see agent.py); None if it concerns the agent alone."""
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
    """Inside, signals that end a run become events instead of their usual effect."""

    def note(number: int, frame: FrameType | None) -> None:
        events.put(Signal(number))

    with handling(_SIGNALS, note):
        yield


def stopped_by(number: int) -> Stopped:
    """The error that ends the launcher after a signal while no ranks run."""
    kind = Requeued if number in REQUEUE_SIGNALS else Stopped
    return kind(f"stopped by {signal.Signals(number).name}")
