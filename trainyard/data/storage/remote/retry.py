"""Retries of failed requests: back-off with jitter, one line on stderr, a time limit."""

import math
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from trainyard.errors import DataError
from trainyard.printable import print_line

RETRY_S = 600
"""Seconds for which a request may fail before the run ends; $TRAINYARD_RETRY_S overrides it."""
OPTIONAL_S = 30.0  # for a file that data need not have
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10
_QUIET_S = 1  # shorter failures, such as a stale connection, are not reported
_SAY_AGAIN_S = 60  # per server: an outage prints one line for all threads

_last_said: dict[str, float] = {}
_lock = threading.Lock()
_most_s: ContextVar[float] = ContextVar("most_s", default=math.inf)


class Refused(DataError):
    """A server answers, but not with the file."""


class GaveUp(DataError):
    """A request has failed for as long as it may."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Limits the retries of requests that are made inside the block."""
    token = _most_s.set(seconds)
    try:
        yield
    finally:
        _most_s.reset(token)


class Transient(Exception):
    """A temporary failure: retry after at least `pause_s`."""

    def __init__(self, reason: str, pause_s: float = 0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class RetryState:
    """The retry state of one request."""

    def __init__(self, name: str, server: str) -> None:
        self._name, self._server = name, server
        self.reset()

    def reset(self) -> None:
        """Restarts the time limit, after bytes have arrived."""
        self._since: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._has_spoken = False

    def pause_after(self, failure: Transient) -> float:
        """Seconds until the next try. GaveUp once the time is up."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        limit_s = _limit_s()
        left_s = self._since + limit_s - now
        if left_s <= 0:
            remedy = "" if limit_s == _most_s.get() else " (TRAINYARD_RETRY_S sets the seconds)"
            raise GaveUp(
                "storage.gave-up",
                "{url}: {reason}; gave up after {duration}{hint}",
                url=self._name,
                reason=str(failure),
                duration=_duration(limit_s),
                hint=remedy,
            )
        if now - self._since >= min(_QUIET_S, limit_s / 2) and not self._has_spoken:
            self._say(f"{failure}; trying for {_duration(limit_s)}", now)
        pause_s = max(self._pause_s * random.uniform(0.5, 1), failure.pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return min(pause_s, left_s)

    def _say(self, text: str, now: float) -> None:
        self._has_spoken = True
        with _lock:
            if now - _last_said.get(self._server, -_SAY_AGAIN_S) < _SAY_AGAIN_S:
                return
            _last_said[self._server] = now
        print_line(f"waiting for {self._name}: {text}")


def _limit_s() -> float:
    text = os.environ.get("TRAINYARD_RETRY_S", "")
    try:
        return min(max(0.0, float(text)) if text else RETRY_S, _most_s.get())
    except ValueError:
        raise DataError("variable.not-seconds", name="TRAINYARD_RETRY_S", value=text) from None


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.3g} s"
