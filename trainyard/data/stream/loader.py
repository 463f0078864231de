"""One rank's batches of a stream, decoded ahead by a process of threads."""

import sys

from trainyard.data.loading.client import HostBatch, LoaderProcess
from trainyard.data.stream.walk import StreamSpec

_COMMAND = (sys.executable, "-m", "trainyard.data.stream.process")


class StreamLoader(LoaderProcess):
    """Batches, pass after pass, as long as they are asked for."""

    def __init__(self, config: StreamSpec) -> None:
        super().__init__(
            _COMMAND,
            {"config": config},
            batch=config.share,
            image_size=config.image_size,
            threads=config.threads,
        )

    def take(self) -> tuple[HostBatch, bool]:
        """The next batch, and whether it is this rank's last of a pass.

        DataError, which names the shard, if the walk cannot go on; LoaderError if the process died.
        """
        batch, message = self.receive()
        return batch, message["is_last"]
