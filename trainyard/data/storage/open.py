"""Opens files to read by offset, by their scheme."""

from typing import TYPE_CHECKING

from trainyard.data.storage.source import LocalFile, is_remote
from trainyard.errors import DataError

if TYPE_CHECKING:
    from trainyard.data.storage.remote.remote_file import RemoteFile


def open_source(name: str) -> "LocalFile | RemoteFile":
    """Opens a path or URL. OSError if it does not exist, DataError for an unknown scheme."""
    if not is_remote(name):
        return LocalFile(name)
    from trainyard.data.storage.remote.client import run  # loads aiohttp

    return run(remote_file(name).open())


def remote_file(name: str) -> "RemoteFile":
    """A file by its URL, not opened yet. DataError for an unknown scheme."""
    match scheme := name.partition("://")[0].lower():
        case "http" | "https" | "hf":
            from trainyard.data.storage.remote.http import HttpFile

            return HttpFile(name)
        case "s3" | "gs":
            from trainyard.data.storage.remote.object_store import ObjectFile

            return ObjectFile(name)
    raise DataError(
        "storage.unknown-scheme",
        "{url}: {scheme}:// is not known; known are http://, https://, s3://, gs://, hf:// and "
        "paths",
        url=name,
        scheme=scheme,
    )
