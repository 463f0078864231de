"""Writes shards in parallel: worker processes write them, and this process renames them."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from trainyard.datasets.pack.files import Outputs, publish, remove_stale
from trainyard.datasets.pack.journal import Journal, Written
from trainyard.datasets.pack.shards import ShardJob
from trainyard.datasets.pack.worker import PackJob, Signals, begin, write_shard
from trainyard.datasets.workers import Workers
from trainyard.errors import TrainyardError

Progress = Callable[[int], None]
"""Called now and then with the number of samples written."""

_TICK_S = 0.2


def write_shards(
    work: PackJob, jobs: Sequence[ShardJob], journal: Journal, progress: Progress
) -> None:
    """Writes shards and adds them to the journal; removes unfinished files if it fails."""
    progress(0)
    signals = Signals()
    count = max(1, min(work.options.workers, len(jobs)))
    pool = Workers(count, begin, work, signals)
    queue = iter(jobs)
    running: set[Future[tuple[Written, Outputs]]] = set()
    try:
        while True:
            free = 2 * count - len(running)  # a job in reserve for each worker, so that none waits
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
            raise TrainyardError(
                "pack.worker-died",
                "{path}: a packing process died, perhaps out of memory or disk space; the same "
                "command resumes after the complete shards",
                path=work.destination,
            ) from None
        raise
    finally:
        pool.shutdown()
