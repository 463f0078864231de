"""A host's agent through ssh: how the connection ends."""

import os
import queue
import sys
from typing import Any

import pytest

from trainyard.launch.events import Gone
from trainyard.launch.hosts import GivenHost
from trainyard.launch.ssh_remote import Login, Remote


def test_ssh_is_reaped_after_its_group_is_killed_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its number may be that of another group by then."""
    killed: list[int | None] = []

    def killpg(*_: int) -> None:
        killed.append(remote._process.returncode)

    monkeypatch.setattr(os, "killpg", killpg)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ends_at_once = (sys.executable, "-c", "import time; time.sleep(0.2)")
    remote = Remote(GivenHost("a"), Login(ends_at_once, ".", "python"), events)
    assert isinstance(events.get(timeout=20), Gone)
    remote.close()
    assert killed == [None]
