"""The process on each host of `launch ssh` and `launch ray` that starts the host's ranks.

Orders arrive on stdin, one JSON object per line: {"do": "ping"}, {"do": "signal", "number": 15}, …
Messages leave on stdout: {"is": "line", "rank": 0, …}, {"is": "answer", "value": …}, …
The launcher is gone if stdin ends or is silent for SILENCE_S; the ranks then save and end.
"""

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from types import FrameType
from typing import Any

from trainyard.children import SAFE_PATH
from trainyard.launch.exit_codes import GRACE_S
from trainyard.launch.preflight import Doorbell, installed, reached
from trainyard.launch.ranks import End, Line, Ranks, Share

SILENCE_S = 10
PING_S = 2
"""Seconds between the launcher's pings."""
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # the host is going down
_COUNT_DEVICES = "import torch; print(torch.cuda.device_count())"

Message = dict[str, Any]


class Agent:
    def __init__(self, put: Callable[[Message], None]) -> None:
        """`put` sends a message. It is called from any thread and must not block."""
        self._put = put
        self._ranks: Ranks | None = None
        self._doorbell: Doorbell | None = None

    def obey(self, order: Message) -> None:
        match order:
            case {"do": "ping"}:
                self._put({"is": "pong"})
            case {"do": "start", "share": share}:
                self._start(Share(**share))
            case {"do": "signal", "number": number}:
                if self._ranks is not None:
                    self._ranks.signal(number)
            case {"do": "devices"}:
                self._answer(_num_devices)
            case {"do": "listen", "names": names, "towards": towards}:
                self._close_doorbell()
                doorbell = self._doorbell = Doorbell()
                self._answer(lambda: doorbell.location(names, towards))
            case {"do": "reach", **where}:
                self._answer(lambda: reached(**where))

    def close(self) -> None:
        """Stop listening and stop all ranks."""
        self._close_doorbell()
        if self._ranks is not None:
            self._ranks.stop(GRACE_S)

    def _answer(self, work: Callable[[], Any]) -> None:
        """Answer from a thread, so that pings are answered meanwhile."""
        threading.Thread(
            target=lambda: self._put({"is": "answer", "value": work()}), daemon=True
        ).start()

    def _start(self, share: Share) -> None:
        self._close_doorbell()
        try:
            self._ranks = Ranks(share, self._report)
        except OSError as error:
            for rank in share.ranks:
                text = f"trainyard: {share.command[0]}: {error.strerror}"
                self._report(Line(rank, text, is_error=True))
                self._report(End(rank, 2))

    def _report(self, event: Line | End) -> None:
        self._put({"is": type(event).__name__.lower(), **asdict(event)})

    def _close_doorbell(self) -> None:
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None


def _num_devices() -> int:
    """Number of CUDA devices. Counted in a subprocess: torch loads slowly and takes much memory."""
    command = [sys.executable, *SAFE_PATH, "-c", _COUNT_DEVICES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def _orders() -> Iterator[Message]:
    """Yields orders until stdin ends or is silent for SILENCE_S."""
    rest = b""
    while select.select([0], [], [], SILENCE_S)[0]:
        data = os.read(0, 2**16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from map(json.loads, lines)


def _write(outbox: "queue.SimpleQueue[Message]") -> None:
    """Run in its own thread, so that a launcher that does not read blocks no other thread."""
    with suppress(OSError):  # the launcher is gone; stdin ends too
        while True:
            os.write(1, json.dumps(outbox.get()).encode() + b"\n")


def _leave(number: int, frame: FrameType | None) -> None:
    for each in _END_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    """Serve a launcher: messages by stdin and stdout, until either ends."""
    outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_write, args=(outbox,), daemon=True).start()
    for number in _END_SIGNALS:
        signal.signal(number, _leave)
    agent = Agent(outbox.put)
    seen_at = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    outbox.put({"is": "hello", "facts": installed(), "addresses": seen_at})
    try:
        for order in _orders():
            agent.obey(order)
    except SystemExit:
        outbox.put({"is": "leaving"})
        raise
    finally:
        agent.close()


if __name__ == "__main__":
    main()
