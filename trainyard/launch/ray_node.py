"""A Ray actor for each node, which runs an agent there, and the launcher's handle of it.

The agent is a process of its own, so that its ranks are not children of the actor: Ray kills an
actor's children without warning when it ends the actor.
"""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from trainyard.launch.agent import PING_S
from trainyard.launch.attempts import HostsGone
from trainyard.launch.events import Event, Events, Gone, event_of
from trainyard.launch.meeting_point import free_port
from trainyard.launch.ranks import Share

CONCURRENT = 4
"""Concurrent calls of a Node: one of them waits for events."""
_CAUSES = (
    ("its node has died", "its node has died"),
    ("its worker process has died", "its actor was killed"),
    ("is unavailable", "it is not reached"),
)
_ERROR = re.compile(r"\s*\w*Error: ")


class Node:
    """The actor: passes orders to the agent and its events back."""

    def __init__(self, folder: str | None) -> None:
        """`folder`: the working directory; None keeps the one that Ray made."""
        if folder is not None:
            os.chdir(folder)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT, and children inherit it
        self._told: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # one order at a time
        self._agent = subprocess.Popen(
            [sys.executable, "-m", "trainyard.launch.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for work in (self._ping, self._listen):
            threading.Thread(target=work, daemon=True).start()

    def node(self) -> str:
        """Ray's id of this node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def free_port(self) -> int:
        return free_port()

    def order(self, order: dict[str, Any]) -> None:
        if order["do"] == "start":  # runs Ray's Python on this node
            order["share"]["command"] = (sys.executable, *order["share"]["command"][1:])
        assert self._agent.stdin
        with self._lock, suppress(OSError):
            self._agent.stdin.write(json.dumps(order).encode() + b"\n")
            self._agent.stdin.flush()

    def told(self) -> list[dict[str, Any]]:
        """The agent's next messages; waits for at least one. Empty once the agent has ended."""
        messages = [self._told.get()]
        while not self._told.empty():
            messages.append(self._told.get())
        return [message for message in messages if message is not None]

    def _listen(self) -> None:
        assert self._agent.stdout
        for line in self._agent.stdout:
            self._told.put(json.loads(line))
        self._told.put(None)

    def _ping(self) -> None:
        while self._agent.poll() is None:
            self.order({"do": "ping"})
            time.sleep(PING_S)


class RayHost:
    """A node through its actor: messages of the agent become events.

    The first event is an Answer with the installed versions. If the node is lost, the last is Gone.
    """

    def __init__(self, actor: Any, name: str, address: str, events: Events) -> None:
        self.name, self.address, self.gone = name, address, ""
        self._actor, self._events, self._is_closed = actor, events, False
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def start(self, share: Share) -> None:
        self._actor.order.remote({"do": "start", "share": asdict(share)})

    def signal(self, number: int) -> None:
        self._actor.order.remote({"do": "signal", "number": int(number)})

    def free_port(self) -> int:
        import ray
        from ray.exceptions import RayError

        try:
            return int(ray.get(self._actor.free_port.remote()))
        except RayError as error:
            raise HostsGone({self.name: why_lost(error)}) from None

    def close(self) -> None:
        """End the actor; its remaining ranks save and end too."""
        import ray

        self._is_closed = True
        ray.kill(self._actor)
        self._thread.join()

    def _listen(self) -> None:
        from ray.exceptions import RayError

        why = "its agent has ended"
        try:
            for event in self._heard():
                self._events.put(event)
        except RayError as error:
            why = why_lost(error)
        if not self._is_closed:
            self.gone = why
            self._events.put(Gone(self.name, why))

    def _heard(self) -> Iterator[Event]:
        import ray

        while messages := ray.get(self._actor.told.remote()):
            events = (event_of(message, self.name) for message in messages)
            yield from (event for event in events if event is not None)


def why_lost(error: Exception) -> str:
    """A short form of Ray's long message about an actor that is lost or could not start."""
    text = str(error)
    known = (short for words, short in _CAUSES if words in text)
    errors = [line for line in text.splitlines() if _ERROR.match(line)]
    return next(known, (errors or text.splitlines() or ["lost"])[-1].strip())
