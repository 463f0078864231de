"""The loader process for streams: walks through a rank's shards, decodes, and fills the ring.

Started by `StreamLoader` as `python -m trainyard.data.stream.process CHANNEL_FD MEMORY_FD`.
"""

import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainyard.data.fill import Bad, Columns, put
from trainyard.data.loader_client import ENDING_SIGNALS
from trainyard.data.loader_process import Work, deliverer, fill_all, run
from trainyard.data.ring import Ring, Slot
from trainyard.data.source import without_login
from trainyard.data.stream.walk import PassBatch, StreamSpec, walk

if TYPE_CHECKING:
    from trainyard.data.loader_process import Channel


def _serve(channel: "Channel", memory_fd: int, spec: dict[str, Any]) -> None:
    for number in ENDING_SIGNALS:  # also in commands: some shells unblock what the loader blocks
        signal.signal(number, signal.SIG_IGN)
    config: StreamSpec = spec["config"]
    ring = Ring(memory_fd, **spec["ring"])
    fill_all(_batches(config), channel, ring, deliverer(channel), threads=config.threads)


def _batches(config: StreamSpec) -> Iterator[Work]:
    for batch in walk(config):
        yield Work(len(batch.items), partial(_fill, config, batch), batch.is_last)


def _fill(config: StreamSpec, batch: PassBatch, slot: Slot, part: slice) -> Bad:
    items = batch.items[part]
    columns = Columns(
        encoded=[item.sample.image for item in items],
        labels=np.array([item.sample.label for item in items]),
        ids=np.array([item.id for item in items]),
        visits=np.full(len(items), batch.number),
    )
    bad = put(columns, slot, part, crop=config.crop, how=config.interpolation)
    return [
        (
            items[place].id,
            without_login(config.shards[items[place].shard]),
            items[place].sample.offset,
            f"sample {items[place].sample.key!r}: {reason}",
        )
        for place, reason in bad.items()
    ]


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), _serve)
