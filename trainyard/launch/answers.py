"""Collecting answers of hosts while no ranks run."""

import queue
import time
from collections.abc import Callable, Collection
from typing import Any

from trainyard.launch.events import Answer, Events, Gone, Signal, stopped_by

_LOOK_S = 0.2


def answers(
    events: Events, names: Collection[str], wait_s: float, show: Callable[[int], None]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The answers by host, and for each other host why there is none, after at most `wait_s`.

    `show` is called with the number of hosts done. Raises Stopped if a signal arrives.
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
    late = set(names) - found.keys() - gone.keys()
    return found, gone | dict.fromkeys(late, f"no answer within {wait_s:.0f} s")


def pause(events: Events, seconds: float) -> None:
    """Sleep. Raises Stopped if a signal arrives."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        _next(events, left)


def forget(events: Events) -> None:
    """Drop events of hosts that are now closed. Raises Stopped if a signal has arrived."""
    while not events.empty():
        _next(events, 0)


def _next(events: Events, seconds: float) -> object:
    """The next event, or None after `seconds`. Raises Stopped at a signal."""
    try:
        event = events.get(timeout=seconds)
    except queue.Empty:
        return None
    if isinstance(event, Signal):
        raise stopped_by(event.number)
    return event
