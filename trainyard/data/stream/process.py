"""The loader process for streams: reads a rank's shards, decodes images, and fills the ring.

`StreamLoader` starts it as `python -m trainyard.data.stream.process CHANNEL_FD MEMORY_FD`.
"""

import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainyard.data.loader.client import ENDING_SIGNALS
from trainyard.data.loader.fill import Bad, SliceContents, put
from trainyard.data.loader.process import fill_all, run
from trainyard.data.loader.result_sender import BatchTask, ResultSender
from trainyard.data.loader.ring import Ring, Slot
from trainyard.data.stream.walk import PassBatch, StreamSpec, walk

if TYPE_CHECKING:
    from trainyard.data.loader.process import Channel


def _serve(channel: "Channel", memory_fd: int, spec: dict[str, Any]) -> None:
    for number in ENDING_SIGNALS:  # in commands too: some shells unblock what the loader blocks
        signal.signal(number, signal.SIG_IGN)
    config: StreamSpec = spec["config"]
    ring = Ring(memory_fd, **spec["ring"])
    sender = ResultSender(channel, config.threads)
    fill_all(_batches(config), channel, ring, sender, threads=config.threads)


def _batches(config: StreamSpec) -> Iterator[BatchTask]:
    for batch in walk(config):
        yield BatchTask(len(batch.items), partial(_fill, config, batch), batch.is_last)


def _fill(config: StreamSpec, batch: PassBatch, slot: Slot, part: slice) -> Bad:
    items = batch.items[part]
    ids, visits = np.array([item.id for item in items]), np.full(len(items), batch.number)
    columns = SliceContents(
        encoded=[item.sample.image for item in items],
        labels=np.array([item.sample.label for item in items]),
        ids=ids,
        visits=visits,
        crops=config.crop.draw(ids, visits),
    )
    bad = put(columns, slot, part, how=config.interpolation)
    return [
        (
            items[place].id,
            config.shards[items[place].shard],
            items[place].sample.offset,
            f"sample {items[place].sample.key!r}: {reason}",
        )
        for place, reason in bad.items()
    ]


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), _serve)
