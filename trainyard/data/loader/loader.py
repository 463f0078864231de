"""Batches in the order of a plan, decoded ahead by one multi-threaded process per rank.

The process is `process.py`; the loader takes finished batches in order from a shared ring.
"""

import json
import multiprocessing.connection as mpc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from trainyard.children import SAFE_PATH, has_ended, kill_group
from trainyard.data.arrays import Bytes
from trainyard.data.batch import BadSample, HostBatch
from trainyard.data.index.table import Index
from trainyard.data.loader.encoded_batch import side_of
from trainyard.data.loader.ring import Ring, num_slots
from trainyard.data.loader.spec import AGAIN, ENDING_SIGNALS, LoaderSpec
from trainyard.data.storage.credentials import known
from trainyard.data.storage.source import Closing
from trainyard.errors import DataError, LoaderError
from trainyard.image_size import ImageSize

_CHECK_S = 0.5  # interval at which a waiting trainer checks that the loader process is alive
_CLOSE_S, _KILL_S = 5, 1  # limits for ending after a request, a kill
_LINE = 2**16  # bytes of a message that are passed on together


class LoaderProcess(Closing):
    """A running loader process; a context manager that leaves nothing behind."""

    death_s: float = 10
    """Seconds that the process has to end once it has hung up."""

    def __init__(
        self,
        command: Sequence[str],
        spec: dict[str, Any],
        *,
        batch: int,
        image_size: ImageSize,
        channels: int,
        threads: int,
    ) -> None:
        """`command CHANNEL_FD MEMORY_FD` fills slots of up to `batch` images by `spec`."""
        slots, images = num_slots(batch, threads), {"size": image_size, "channels": channels}
        shape: dict[str, Any] = {"num_slots": slots, "batch": batch, **images}
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("trainyard-batches", os.MFD_CLOEXEC)
        try:
            self._ring = Ring(memory, **shape)
            with _signals_blocked():
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(memory)],
                    pass_fds=(theirs.fileno(), memory),
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # out of reach of Ctrl-C and of a launcher's killpg
                )
        finally:
            os.close(memory)
            theirs.close()
        self._channel = mpc.Connection(ours.detach())
        self._held: int | None = None
        self._last_message = ""
        self._listener = threading.Thread(target=self._pass_messages_on, daemon=True)
        self._listener.start()
        self.closing = ExitStack()
        """Clean-up on the trainer's side, run when the process has ended."""
        try:
            self._channel.send(spec | {"ring": shape, "credentials": known()})
            for slot in range(slots):
                self._channel.send_bytes(bytes([slot]))
        except OSError:
            raise self._death() from None

    def receive(self) -> tuple[HostBatch, dict[str, Any]]:
        """The next batch, and the whole message about it.

        DataError if the data is gone, LoaderError if the loader failed.
        """
        message = self._exchange()
        if "data_error" in message:
            raise DataError.unpacked(*message["data_error"])
        if "error" in message:
            raise LoaderError(
                "loader.failed",
                "the loader process failed:\n{traceback}",
                traceback=message["error"],
            )
        self._held = message["slot"]
        slot, count = self._ring.slots[self._held], message["count"]
        batch = replace(
            slot.part(slice(count)),
            bad=[BadSample(*row) for row in message["bad"]],
            acquire=partial(self._acquire, self._held),
            capacity=message["capacity"],
        )
        return batch, message

    def begin_again(self) -> None:
        """Asks for another pass, after all batches of one; until then the process is idle."""
        with suppress(OSError):  # the process may have ended; `receive` finds out why
            self._channel.send_bytes(bytes([AGAIN]))

    def is_ready(self) -> bool:
        """True if `receive` would return at once."""
        return self._channel.poll(0)

    @property
    def memory(self) -> Bytes:
        """The whole memory of the ring, which begins on a page border."""
        return self._ring.memory

    def _acquire(self, slot: int) -> Callable[[], None]:
        if self._held == slot:
            self._held = None
        return partial(self._release, slot)

    def _release(self, slot: int) -> None:
        # The process may have ended with an error, which `receive` reads, or have been closed.
        with suppress(OSError):
            self._channel.send_bytes(bytes([slot]))

    def _exchange(self) -> dict[str, Any]:
        """Returns the held slot and waits for the next full one."""
        try:
            if self._held is not None:
                self._release(self._held)
            while not self._channel.poll(_CHECK_S):
                if has_ended(self._process) and not self._channel.poll(0):
                    raise self._death()
            message: dict[str, Any] = json.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            raise self._death() from None
        return message

    def _death(self) -> LoaderError:
        if not self._end(self.death_s):
            return LoaderError(
                "loader.hung",
                "the loader process hung up and did not end; it waits for a disk or a file server "
                "that does not answer, perhaps",
            )
        code, why = self._process.returncode, ""
        if code == -signal.SIGKILL:
            why = "; without your doing this usually means that the machine ran out of memory"
        elif self._last_message:
            why = f"; its last message: {self._last_message}"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return LoaderError(
            "loader.died", "the loader process died ({reason}){hint}", reason=how, hint=why
        )

    def _pass_messages_on(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as messages:
            for line in iter(partial(messages.readline, _LINE), b""):
                text = line.decode(errors="replace")
                self._last_message = text.strip() or self._last_message
                with suppress(OSError, ValueError):  # nobody reads it, or it is closed
                    sys.stderr.write(text)

    def _end(self, patience_s: float) -> bool:
        """Kills the process and all that it started; True if it ended by itself in time."""
        ended = has_ended(self._process, patience_s)
        kill_group(self._process)
        with suppress(subprocess.TimeoutExpired):  # stuck in the kernel, on a dead file server say
            self._process.wait(timeout=_KILL_S)
        self._listener.join(_KILL_S)
        return ended

    def close(self) -> None:
        """Ends the loader process and the processes that it started.

        The process ends itself and them when the channel closes, unless it has died before.
        """
        if self._channel.closed:
            return
        self._channel.close()
        self._end(_CLOSE_S)
        self.closing.close()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process started inside never receives the signals that end a run, not even at its start.

    The trainer decides when to end: a signal to all processes must not cut off its last steps.
    """
    mine = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mine)


_COMMAND = (sys.executable, *SAFE_PATH, "-m", "trainyard.data.loader.process")


class Loader(LoaderProcess):
    """An iterator over one rank's batches; `iter` after the last one begins another pass."""

    def __init__(self, index: Index, config: LoaderSpec) -> None:
        self._num_steps = self._steps_left = config.stop - config.start
        share = -(-config.plan.global_batch // config.size)
        spec = {"index": [str(index.path), index.fingerprint], "config": config}
        size = config.image_size
        if config.decode == "gpu":  # the slots are for encoded images
            size = side_of(float(index.size.mean()), size)
        super().__init__(
            *(_COMMAND, spec),
            batch=share,
            image_size=size,
            channels=config.channels,
            threads=config.threads,
        )

    def __iter__(self) -> Iterator[HostBatch]:
        if self._steps_left == 0:
            self.begin_again()
            self._steps_left = self._num_steps
        return self

    def __next__(self) -> HostBatch:
        """The next batch; for errors see `receive`."""
        if self._steps_left == 0:
            raise StopIteration
        batch, _ = self.receive()
        self._steps_left -= 1
        return batch
