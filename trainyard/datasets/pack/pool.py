"""Writes shards in parallel: worker processes write them, and this process renames them."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice

from trainyard.data.storage.credentials import known
from trainyard.datasets.pack.files import Outputs, publish, remove_stale
from trainyard.datasets.pack.journal import Journal, Written
from trainyard.datasets.pack.shards import ShardJob
from trainyard.datasets.pack.worker import PackJob, Signals, start, write_shard
from trainyard.errors import TrainyardError

Progress = Callable[[int], None]
"""Called now and then with the number of samples written."""

_TICK_S = 0.2


def write_shards(
    work: PackJob, jobs: Sequence[ShardJob], journal: Journal, progress: Progress
) -> None:
    """Writes shards and adds them to the journal; removes unfinished files if it fails."""
    progress(0)
    # Not fork: the caller may have threads, of torch for instance, that hold locks.
    context = multiprocessing.get_context("spawn")
    signals = Signals(context)
    count = max(1, min(work.options.workers, len(jobs)))
    pool = ProcessPoolExecutor(
        count, mp_context=context, initializer=start, initargs=(work, signals, known())
    )
    queue = iter(jobs)
    running: set[Future[tuple[Written, Outputs]]] = set()
    try:
        while True:
            free = 2 * count - len(running)  # a job in reserve for each worker, so that none waits
            with _interrupts_held():
                running |= {pool.submit(write_shard, job) for job in islice(queue, free)}
            if not running:
                return
            finished = wait(running, _TICK_S, FIRST_COMPLETED).done
            for future in finished:
                written, outputs = future.result()
                publish(outputs)
                running.remove(future)
                journal.add(written)
            progress(signals.count.value)
    except BaseException as error:
        signals.stop.value = 1
        pool.shutdown(cancel_futures=True)
        # By their names: Ctrl-C may come between a worker's start of a shard and a note of it.
        remove_stale(work.destination, jobs, journal.part)
        if isinstance(error, BrokenProcessPool):
            raise TrainyardError("pack.worker-died", path=work.destination) from None
        raise
    finally:
        pool.shutdown()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delays Ctrl-C, and keeps it from processes started inside, which this process stops."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
