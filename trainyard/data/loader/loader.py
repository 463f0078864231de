"""Batches in the order of a plan, decoded ahead by one multi-threaded process per rank.

The process is `process.py`; the loader takes finished batches in order from a shared ring.
"""

import sys
from collections.abc import Iterator

from trainyard.children import SAFE_PATH
from trainyard.data.batch import HostBatch
from trainyard.data.index.table import Index
from trainyard.data.loader.client import LoaderProcess
from trainyard.data.loader.encoded_batch import side_of
from trainyard.data.loader.spec import LoaderSpec

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
