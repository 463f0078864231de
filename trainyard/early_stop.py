"""Signals outside of the training loop: the command ends with the exit code of a stop.

Inside the loop `training.stop` handles them, and saves a checkpoint first. Outside, while torch is
imported, data indexed, ranks awaited or a report written, there is nothing to save.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from trainyard.errors import Requeued, Stopped

REASONS: dict[signal.Signals, type[Stopped]] = {
    signal.SIGUSR1: Requeued,
    signal.SIGUSR2: Requeued,
    signal.SIGXCPU: Requeued,  # of a limit of processor time, once a second
    signal.SIGTERM: Stopped,
    signal.SIGHUP: Stopped,  # of a terminal that was closed
}
"""Ctrl-C is not included: Python's own KeyboardInterrupt ends a command with 130."""
PATIENCE_S = 5
"""Seconds after a signal for the main thread to end; a library call may delay it."""

_asked: Stopped | None = None
_at_once: dict[int, Callable[[], None]] = {}
_is_open = False  # True inside early_stops
_lock = threading.Lock()


def asked() -> Stopped | None:
    """The stop requested by a signal before the loop, in case an `except` has swallowed it."""
    return _asked


@contextmanager
def at_once(number: signal.Signals, deed: Callable[[], None]) -> Iterator[None]:
    """Inside, a thread of `early_stops` does `deed` when the signal arrives.

    A handler of Python's would run later: the main thread may be in a library, where it waits for
    other ranks. No effect outside of `early_stops`, nor outside of the main thread.
    """
    if not _is_open or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, lambda number, frame: None)
    _at_once[number] = deed
    try:
        yield
    finally:
        del _at_once[number]
        signal.signal(number, before)


@contextmanager
def early_stops() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise Stopped (130), the others Requeued (75).

    The exception may be lost, in an import of torch for instance, or late. The signal is therefore
    sent again every second, to its current handler, and after 5 s the process ends with the same
    code. No effect outside of the main thread; ignored signals stay ignored.
    """
    global _asked, _is_open
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _is_open = True
    before = {
        number: signal.signal(number, _raise)
        for number in REASONS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    left = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_insist, args=(reader, left), daemon=True)
    thread.start()
    try:
        yield
    finally:
        with _lock:
            _asked, _is_open = None, False
            left.set()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            if signal.getsignal(number) is _raise:  # a rank ending after a loss has another
                signal.signal(number, handler)
        os.close(writer)  # ends the thread
        thread.join(timeout=1)


def _raise(number: int, frame: FrameType | None) -> None:
    global _asked
    if _is_open:
        _asked = _error(signal.Signals(number))
        if _is_torch_loading():
            _end(_asked)
        raise _asked


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Python's handler of SIGINT, for a process that may be loading torch."""
    if _is_torch_loading():
        _end(Stopped("interrupted"))
    raise KeyboardInterrupt


def _is_torch_loading() -> bool:
    """True inside its import: an exception in its C++ aborts the process."""
    torch = sys.modules.get("torch")
    return getattr(getattr(torch, "__spec__", None), "_initializing", False)


def _end(error: Stopped) -> NoReturn:
    """Ends the process at once: nothing has begun that would need an end."""
    os.write(2, f"trainyard: {error}\n".encode())
    os._exit(error.exit_code)


def _error(number: signal.Signals) -> Stopped:
    return REASONS[number](f"stopped by {number.name} while not training: nothing to save")


def _insist(reader: int, left: threading.Event) -> None:
    """Do the deeds of `at_once`. Send a signal that stops again until the block is left or another
    handler has received it.
    """
    while numbers := os.read(reader, 1):
        number = signal.Signals(numbers[0])
        if deed := _at_once.get(number):
            deed()
        if number in REASONS and _is_deaf(number, left):
            _end(_error(number))
    os.close(reader)


def _is_deaf(number: signal.Signals, left: threading.Event) -> bool:
    """True if the main thread neither ends nor changes the handler, despite repeated signals."""
    global _asked
    if signal.getsignal(number) is not _raise and _asked is None:
        return False  # the other handler has received it
    for _ in range(PATIENCE_S):
        left.wait(1)
        with _lock:
            if left.is_set():
                return False
            is_ours = signal.getsignal(number) is _raise
            if is_ours or _asked is not None:
                os.kill(os.getpid(), number)
            if not is_ours:
                _asked = None
                return False
    return True


def _forget() -> None:
    """Drop the parent's handlers and pipe in a forked child."""
    global _is_open
    if _is_open:
        _is_open = False
        signal.set_wakeup_fd(-1)
        for number in REASONS:
            if signal.getsignal(number) is _raise:
                signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
