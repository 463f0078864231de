"""The trainer's side of a loader process, which fills a ring of batches that both share.

Threads in the trainer's own process would slow the trainer; several processes would each hold the
index and the decoders.
"""

import json
import multiprocessing.connection as mpc
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from trainyard.children import has_ended, kill_group
from trainyard.data.credentials import known
from trainyard.data.loading.ring import Ring, num_slots
from trainyard.errors import DataError, LoaderError

_CHECK_S = 0.5  # how often a waiting trainer looks whether the loader process still lives
_DEATH_S, _CLOSE_S, _KILL_S = 10, 5, 1  # to end after hanging up, on our word, when killed
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class BadSample(NamedTuple):
    """A sample that could not be read or decoded."""

    id: int
    file: str
    offset: int
    reason: str


def _nothing() -> None:
    pass


class HostBatch(NamedTuple):
    """One rank's share of a global batch; its arrays are valid until the next one is fetched.

    After a call of `keep` they are, until what it gives is called.
    """

    images_BHWC: NDArray[np.uint8]
    labels: NDArray[np.int64]
    ids: NDArray[np.int64]
    visits: NDArray[np.int64]  # which visit to its sample each is; see Plan.epochs
    weights: NDArray[np.float32]  # 0 for a bad sample, else 1
    bad: list[BadSample]
    keep: Callable[[], Callable[[], None]] = lambda: _nothing
    capacity: float = 0.0
    """Images a second that the loader would make if it never waited for the trainer, by what this
    batch took its threads; 0 where it is not known."""


class LoaderProcess:
    """A running loader process; a context manager that leaves nothing behind."""

    def __init__(
        self,
        command: Sequence[str],
        spec: dict[str, Any],
        *,
        batch: int,
        image_size: int,
        threads: int,
    ) -> None:
        """`command CHANNEL_FD MEMORY_FD` fills slots for up to `batch` images, as `spec` says."""
        slots = num_slots(batch, threads)
        shape = {"num_slots": slots, "batch": batch, "size": image_size}
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("trainyard-batches", os.MFD_CLOEXEC)
        try:
            self._ring = Ring(memory, **shape)
            with _signals_blocked():
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(memory)],
                    pass_fds=(theirs.fileno(), memory),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # out of reach of Ctrl-C and of a launcher's killpg
                )
        finally:
            os.close(memory)
            theirs.close()
        self._channel = mpc.Connection(ours.detach())
        self._held: int | None = None
        self.closing = ExitStack()
        """What ends with the process, on the trainer's side."""
        try:
            self._channel.send(spec | {"ring": shape, "credentials": known()})
            for slot in range(slots):
                self._channel.send_bytes(bytes([slot]))
        except OSError:
            raise self._death() from None

    def receive(self) -> tuple[HostBatch, dict[str, Any]]:
        """The next batch, and all that the process says of it.

        DataError if the data is gone, LoaderError if the loader failed.
        """
        message = self._exchange()
        if "data_error" in message:
            raise DataError(message["data_error"])
        if "error" in message:
            raise LoaderError(f"the loader process failed:\n{message['error']}")
        self._held = message["slot"]
        slot, count = self._ring.slots[self._held], message["count"]
        batch = HostBatch(
            images_BHWC=slot.images_BHWC[:count],
            labels=slot.labels[:count],
            ids=slot.ids[:count],
            visits=slot.visits[:count],
            weights=slot.weights[:count],
            bad=[BadSample(*row) for row in message["bad"]],
            keep=partial(self._keep, self._held),
            capacity=message["capacity"],
        )
        return batch, message

    def is_ready(self) -> bool:
        """Whether `receive` would not wait."""
        return self._channel.poll(0)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All of the ring, which begins on a page border."""
        return self._ring.memory

    def _keep(self, slot: int) -> Callable[[], None]:
        if self._held == slot:
            self._held = None
        return partial(self._give_back, slot)

    def _give_back(self, slot: int) -> None:
        # It may have ended with an error, which `receive` reads, or have been closed.
        with suppress(OSError):
            self._channel.send_bytes(bytes([slot]))

    def _exchange(self) -> dict[str, Any]:
        """Hand the held slot back and wait for the next full one."""
        try:
            if self._held is not None:
                self._give_back(self._held)
            while not self._channel.poll(_CHECK_S):
                if has_ended(self._process) and not self._channel.poll(0):
                    raise self._death()
            message: dict[str, Any] = json.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            raise self._death() from None
        return message

    def _death(self) -> LoaderError:
        if not self._end(_DEATH_S):
            return LoaderError(
                "the loader process hung up and did not end; it waits for a disk or a file server "
                "that does not answer, perhaps"
            )
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return LoaderError(
            f"the loader process died ({how}); signal 9 without your doing usually means that "
            "the machine ran out of memory"
        )

    def _end(self, patience_s: float) -> bool:
        """Whether the process ends by itself; in any case it ends, with all that it started."""
        ended = has_ended(self._process, patience_s)
        kill_group(self._process)
        with suppress(subprocess.TimeoutExpired):  # stuck in the kernel, on a dead file server say
            self._process.wait(timeout=_KILL_S)
        return ended

    def close(self) -> None:
        """End the loader process and what it started.

        It stops by itself when the channel closes, and stops them; but it may have died before.
        """
        if self._channel.closed:
            return
        self._channel.close()
        self._end(_CLOSE_S)
        self.closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process started inside never gets the signals that end a run, not even while it starts.

    The trainer decides when to end: a signal to all processes must not cut its last steps.
    """
    mine = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mine)
