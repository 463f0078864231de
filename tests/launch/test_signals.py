import queue
import signal
import threading

import pytest

from trainyard.launch.signals import handling, next_event


def test_a_signal_that_another_thread_receives_is_an_event() -> None:
    """The main thread slept on, so that a launcher ran for ever after Ctrl-C."""
    events: queue.SimpleQueue[int] = queue.SimpleQueue()
    is_over = threading.Event()
    reader = threading.Thread(target=is_over.wait)
    reader.start()
    assert reader.ident is not None
    to_reader = (reader.ident, signal.SIGUSR1)
    with handling((signal.SIGUSR1,), lambda number, frame: events.put(number)):
        threading.Timer(0.1, signal.pthread_kill, to_reader).start()
        try:
            assert next_event(events) == signal.SIGUSR1
        finally:
            is_over.set()
            reader.join()


def test_the_wait_ends() -> None:
    with pytest.raises(queue.Empty):
        next_event(queue.SimpleQueue[int](), 0.01)
