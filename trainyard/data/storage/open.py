"""Opens files to read by offset, by their scheme."""

from trainyard.data.storage.source import LocalFile, Source, Stamp, is_remote
from trainyard.errors import DataError


def open_source(name: str) -> Source:
    """Opens a path or URL. OSError if it does not exist, DataError for an unknown scheme."""
    if not is_remote(name):
        return LocalFile(name)
    match scheme := name.partition("://")[0].lower():
        case "http" | "https" | "hf":
            from trainyard.data.storage.remote.http import HttpFile  # loads urllib3

            return HttpFile(name)
        case "s3" | "gs":
            from trainyard.data.storage.remote.object_store import ObjectFile

            return ObjectFile(name)
    raise DataError(
        f"{name}: {scheme}:// is not known; known are http://, https://, s3://, gs://, hf:// and "
        "paths"
    )


def open_indexed(name: str, stamp: Stamp | None) -> Source:
    """Opens a file to train from. DataError if a remote one is gone or has changed.

    A missing local file may be a single image; a remote one is a shard, or the whole data set.
    """
    if not is_remote(name):
        return open_source(name)
    try:
        source = open_source(name)
    except OSError as error:
        raise DataError(f"{error}; it existed when it was indexed") from None
    if stamp is not None and source.stamp != stamp:
        raise DataError(
            f"{source.name} has changed on the server since it was indexed: start again, and it is "
            "indexed anew"
        )
    return source
