"""Reads a few files of a small .tar.gz into memory; writes nothing to disk."""

import gzip
import io
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path

from trainyard.errors import DataError


def read_members(path: Path, wanted: Collection[str], max_bytes: int) -> dict[str, bytes]:
    """The contents of the members whose paths end in the `wanted` ones.

    DataError if one is missing, or if the archive unpacks to more than `max_bytes`.
    """
    try:
        with gzip.open(path) as packed:
            unpacked = packed.read(max_bytes + 1)
        if len(unpacked) > max_bytes:
            raise DataError("prepare.archive-too-large", path=path, size=max_bytes)
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as tar:
            found = {
                name: unpacked[member.offset_data : member.offset_data + member.size]
                for member in tar
                for name in wanted
                if member.isreg() and f"/{member.name}".endswith(f"/{name}")
            }
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError("prepare.archive-unreadable", path=path, reason=str(error)) from None
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DataError("prepare.missing-member", path=path, member=missing[0])
    return found
