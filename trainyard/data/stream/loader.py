"""One rank's batches of a stream, decoded ahead by a multi-threaded process."""

import sys

from trainyard.children import SAFE_PATH
from trainyard.data.batch import HostBatch
from trainyard.data.loader.client import LoaderProcess
from trainyard.data.stream.walk import StreamSpec

_COMMAND = (sys.executable, *SAFE_PATH, "-m", "trainyard.data.stream.process")


class StreamLoader(LoaderProcess):
    """Batches of one pass after the other, on request."""

    def __init__(self, config: StreamSpec) -> None:
        super().__init__(
            _COMMAND,
            {"config": config},
            batch=config.share,
            image_size=config.image_size,
            channels=config.channels,
            threads=config.threads,
        )

    def take(self) -> tuple[HostBatch, bool]:
        """The next batch, and True if it is this rank's last of a pass.

        DataError, which names the shard, if reading fails; LoaderError if the process died.
        """
        batch, message = self.receive()
        return batch, message["is_last"]
