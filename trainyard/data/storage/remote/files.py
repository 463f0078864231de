"""The remote files that a reader has open: each is looked at once, however many reads wait."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from trainyard.data.storage.open import remote_file
from trainyard.data.storage.remote.client import run
from trainyard.data.storage.remote.remote_file import RemoteFile
from trainyard.data.storage.source import Stamp, reason_of
from trainyard.errors import DataError

_MAX_OPEN = 8192  # an open file holds no descriptor, and opening one costs a round trip

StampOf = Callable[[str], Stamp | None]
"""The stamp of a file when it was indexed, by its name; None if the index has none."""


class RemoteFiles:
    """Open remote files; the least recently used are forgotten. DataError for a changed one."""

    def __init__(self, stamp_of: StampOf) -> None:
        self._stamp_of = stamp_of
        self._open: OrderedDict[str, asyncio.Task[RemoteFile]] = OrderedDict()

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Exactly `size` bytes. OSError if they cannot be read, DataError if no others can."""
        return run(self._opened(name)).read(offset, size)

    async def fetch(self, name: str, offset: int, size: int) -> bytes:
        """Like `read`, in the event loop."""
        return await (await self._opened(name)).fetch(offset, size)

    async def _opened(self, name: str) -> RemoteFile:
        task = self._open.pop(name, None) or asyncio.create_task(self._checked(name))
        self._open[name] = task
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        try:
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and self._open.get(name) is task:
                del self._open[name]
            raise

    async def _checked(self, name: str) -> RemoteFile:
        try:
            file = await remote_file(name).open()
        except OSError as error:  # a shard, or the whole data set
            raise DataError("storage.gone", url=name, reason=reason_of(error, name)) from None
        stamp = self._stamp_of(name)
        if stamp is not None and file.stamp != stamp:
            raise DataError("data.changed-since-indexed", path=file.name)
        return file
