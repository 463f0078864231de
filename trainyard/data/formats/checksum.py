"""The checksum of a part of a file, read piece by piece."""

from crc32c import crc32c

from trainyard.data.storage.source import Source

_PIECE = 1 << 22  # bytes


def checksum(source: Source, begin: int, end: int) -> int:
    """CRC-32C of the bytes [begin, end)."""
    found = 0
    for at in range(begin, end, _PIECE):
        found = crc32c(source.read(at, min(_PIECE, end - at)), found)
    return found
