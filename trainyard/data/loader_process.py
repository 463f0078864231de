"""The loader process: reads, decodes and fills the ring, and ends when the trainer does.

Started by `Loader` as `python -m trainyard.data.loader_process CHANNEL_FD MEMORY_FD`. It imports
no torch, so it starts in a fraction of a second and stays small.
"""

import json
import multiprocessing.connection as mpc
import os
import queue
import sys
import threading
import traceback
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from trainyard.data.decode import decode_batch
from trainyard.data.index import Index, load_index
from trainyard.data.loader import LoaderSpec
from trainyard.data.plan import Ids
from trainyard.data.read import Reader
from trainyard.data.ring import Ring, Slot
from trainyard.data.stage.copies import Copies
from trainyard.data.stage.stager import Stager
from trainyard.errors import DataError

if TYPE_CHECKING:
    Channel = mpc.Connection[Any, Any]

Bad = list[tuple[int, str, int, str]]  # id, file, offset, reason


@dataclass(frozen=True)
class Pending:
    """A batch that threads are filling."""

    slot: int
    count: int
    slices: list[Future[Bad]]


def main(channel_fd: int, memory_fd: int) -> None:
    warnings.filterwarnings("ignore", module="PIL")  # odd metadata does not make an image bad
    Image.init()  # here, not in threads: one would pass over the formats another is registering
    channel = mpc.Connection(channel_fd)
    try:
        _serve(channel, memory_fd, channel.recv())
    except EOFError:
        pass  # the trainer closed the channel or died
    except DataError as error:
        _send(channel, {"data_error": str(error)})
    except Exception:
        _send(channel, {"error": traceback.format_exc()})
    finally:
        os._exit(0)  # not waiting for threads: what they are filling, nobody will read


def _serve(channel: "Channel", memory_fd: int, spec: dict[str, Any]) -> None:
    config: LoaderSpec = spec["config"]
    path, fingerprint = spec["index"]
    index = load_index(Path(path))
    if index is None or index.fingerprint != fingerprint:
        raise FileNotFoundError(f"the index {path} is gone, or another has taken its place")
    ring = Ring(memory_fd, **spec["ring"])
    stager = Stager(index, config.stage, config.stage_gb) if config.stage else None
    fill = SliceFiller(index, config, stager.copies if stager else None)
    pending: queue.SimpleQueue[Pending] = queue.SimpleQueue()
    threading.Thread(target=_deliver, args=(channel, pending), daemon=True).start()
    if stager is not None:
        stager.start().add_done_callback(partial(_staged, stager.copies, pending))
    pool = ThreadPoolExecutor(config.threads)
    for step in range(config.start, config.stop):
        ids = config.plan.batch(step, config.rank, config.size)
        epochs = config.plan.epochs(step, config.rank, config.size)
        slot = channel.recv_bytes()[0]  # waits here while the trainer is behind
        slices = [
            pool.submit(fill, ring.slots[slot], ids, epochs, part)
            for part in _slices(len(ids), config.threads)
        ]
        pending.put(Pending(slot, len(ids), slices))
    while True:  # until the trainer closes the channel
        channel.recv_bytes()


def _deliver(channel: "Channel", pending: "queue.SimpleQueue[Pending]") -> None:
    """Announce batches in order, each when all its slices are filled."""
    while True:
        batch = pending.get()
        try:
            bad = [row for part in batch.slices for row in part.result()]
        except DataError as error:  # no single sample, but the data set: a server that is gone
            _send(channel, {"data_error": str(error)})
            os._exit(1)
        except Exception:
            _send(channel, {"error": traceback.format_exc()})
            os._exit(1)
        _send(channel, {"slot": batch.slot, "count": batch.count, "bad": bad})


def _staged(
    copies: Copies, pending: "queue.SimpleQueue[Pending]", done: "Future[str | None]"
) -> None:
    """Staging has ended: an error is delivered like one in a batch."""
    error = done.exception()
    if error is not None:
        failed: Future[Bad] = Future()
        failed.set_exception(error)
        pending.put(Pending(0, 0, [failed]))
    elif done.result() is not None and copies.is_news():
        sys.stderr.write(f"trainyard: {done.result()}\n")


def _send(channel: "Channel", message: dict[str, Any]) -> None:
    try:
        channel.send_bytes(json.dumps(message).encode())
    except OSError:  # nobody listens any more
        os._exit(0)


class SliceFiller:
    """Fills one slice of a batch, in a thread: labels, weights, pixels."""

    def __init__(self, index: Index, config: LoaderSpec, copies: Copies | None = None) -> None:
        self._index, self._config = index, config
        self._reader = Reader(index, copies)

    def __call__(self, slot: Slot, ids: Ids, epochs: Ids, part: slice) -> Bad:
        ids, epochs = ids[part], epochs[part]
        encoded, unreadable = self._read(ids)
        bad = decode_batch(
            encoded,
            lambda sizes: self._config.crop(sizes, ids, epochs),
            slot.images_BHWC[part],
            self._config.interpolation,
        )
        bad |= unreadable
        slot.ids[part] = ids
        slot.visits[part] = epochs
        slot.labels[part] = self._index.label[ids]
        slot.weights[part] = [position not in bad for position in range(len(ids))]
        return [self._describe(int(ids[position]), reason) for position, reason in bad.items()]

    def _read(self, ids: Ids) -> tuple[list[bytes], dict[int, str]]:
        encoded, unreadable = [], {}
        for position, sample in enumerate(ids.tolist()):
            try:
                encoded.append(self._reader.read(sample))
            except OSError as error:
                encoded.append(b"")
                unreadable[position] = str(error)
        return encoded, unreadable

    def _describe(self, sample: int, reason: str) -> tuple[int, str, int, str]:
        path, offset, _ = self._index.locate(sample)
        return sample, path, offset, reason


def _slices(count: int, threads: int) -> list[slice]:
    """Near-equal slices, one per thread; together they cover range(count)."""
    borders = [count * part // threads for part in range(threads + 1)]
    return [slice(a, b) for a, b in pairwise(borders) if a < b]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
