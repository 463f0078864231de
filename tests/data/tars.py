"""Tars for tests, and what an index of a location would read."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from trainyard.data import formats
from trainyard.data.storage.location import find_place

TAR_FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]

Row = tuple[bytes, int]  # the stored bytes and the label


def read_rows(location: str | Path) -> list[Row]:
    """Every sample of a location, its bytes read from where the scan says they are."""
    scan = formats.scan(find_place(str(location)))
    rows = []
    for file in scan.rows:
        content = Path(scan.place.path(file.path)).read_bytes()
        for offset, size, label in zip(file.offsets, file.sizes, file.labels, strict=True):
            rows.append((content[offset : offset + size], label))
    return rows


def write_tar(
    path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT
) -> Path:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def sealed(header: bytes) -> bytes:
    """A header with the checksum that it should have."""
    blank = header[:148] + b" " * 8 + header[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]
