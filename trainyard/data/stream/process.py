"""The loader process for streams: reads a rank's shards, decodes images, and fills the ring.

`StreamLoader` starts it as `python -m trainyard.data.stream.process CHANNEL_FD MEMORY_FD`.
"""

import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainyard.data.batch import BadSample, HostBatch, samples_of
from trainyard.data.loader.fill import fill_samples
from trainyard.data.loader.process import BatchTask, Results, fill_all, run
from trainyard.data.loader.ring import Ring
from trainyard.data.loader.spec import ENDING_SIGNALS
from trainyard.data.stream.walk import PassBatch, StreamSpec, walk

if TYPE_CHECKING:
    from trainyard.data.loader.process import Channel


def _serve(channel: "Channel", memory_fd: int, spec: dict[str, Any]) -> None:
    for number in ENDING_SIGNALS:  # in commands too: some shells unblock what the loader blocks
        signal.signal(number, signal.SIG_IGN)
    config: StreamSpec = spec["config"]
    ring = Ring(memory_fd, **spec["ring"])
    fill_all(partial(_batches, config), channel, ring, Results(channel, config.threads))


def _batches(config: StreamSpec) -> Iterator[BatchTask]:
    for batch in walk(config):
        yield BatchTask(len(batch.items), partial(_fill, config, batch), batch.is_last)


def _fill(config: StreamSpec, batch: PassBatch, slot: HostBatch, part: slice) -> list[BadSample]:
    items = batch.items[part]
    samples = samples_of(
        len(items),
        ids=np.array([item.id for item in items]),
        epochs=batch.number,
        labels=np.array([item.sample.label for item in items]),
    )
    images = [item.sample.image for item in items]
    crops = config.crop.draw(samples.ids, samples.epochs)
    how, rendering = config.interpolation, config.rendering
    bad = fill_samples(images, samples, crops, slot.part(part), how=how, rendering=rendering)
    return [
        BadSample(
            items[position].id,
            config.shards[items[position].shard],
            items[position].sample.offset,
            f"sample {items[position].sample.key!r}: {reason}",
        )
        for position, reason in bad.items()
    ]


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), _serve)
