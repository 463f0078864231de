"""Events of hosts, ranks and signals, in one queue of a launcher."""

import queue
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trainyard.errors import STOPS
from trainyard.launch.ranks import End, Line
from trainyard.launch.signals import handling, next_event, stopped_by

_LOOK_S = 0.2


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
    """A host's answer to a question that the launcher asks while no ranks run."""

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


# --- signals ---


@contextmanager
def passing_signals(events: Events) -> Iterator[None]:
    """Inside, signals that end a run become events instead of their usual effect."""
    with handling(STOPS, lambda number, frame: events.put(Signal(number))):
        yield


# --- waiting while no ranks run; each function raises Stopped if a signal arrives ---


def answers(
    events: Events,
    names: Collection[str],
    wait_s: float,
    show: Callable[[int], None] = lambda count: None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The answers by host, and the reason for each other host, after at most `wait_s`.

    `show` is called with the number of hosts done.
    """
    found: dict[str, Any] = {}
    gone: dict[str, str] = {}
    deadline = time.monotonic() + wait_s
    while (missing := set(names) - found.keys() - gone.keys()) and time.monotonic() < deadline:
        show(len(names) - len(missing))
        match _next(events, _LOOK_S):
            case Answer(host=host, value=value):
                found[host] = value
            case Gone(host=host, why=why) if host in names:
                gone[host] = why
    return found, gone | dict.fromkeys(missing, f"no answer within {wait_s:.0f} s")


def pause(events: Events, seconds: float) -> None:
    """Sleep."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        _next(events, left)


def forget(events: Events) -> None:
    """Drop events of hosts that are now closed."""
    while not events.empty():
        _next(events, 0)


def _next(events: Events, seconds: float) -> Event | None:
    """The next event, or None after `seconds`."""
    try:
        event = next_event(events, seconds)
    except queue.Empty:
        return None
    if isinstance(event, Signal):
        raise stopped_by(event.number)
    return event
