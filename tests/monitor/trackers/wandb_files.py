"""What W&B has on disk of runs that it has not sent: its log, read by its own messages."""

import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, 7
_WHOLE, _LAST = 1, 4


def records(folder: Path) -> list[Any]:
    """Those of all times that a run was started, the earliest first."""
    record = import_module("wandb.proto.wandb_internal_pb2").Record
    found = []
    for path in sorted(folder.glob("offline-run-*/run-*.wandb")):
        found += [record.FromString(content) for content in _contents(path.read_bytes())]
    return found


def _contents(log: bytes) -> Iterator[bytes]:
    """Of the records of LevelDB's log format, which W&B puts a header of its own before."""
    assert log.startswith(b":W&B")
    at, content = _FILE_HEADER, b""
    while at < len(log):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # nothing begins so close to the end of a block
            at += left
            continue
        _checksum, length, kind = struct.unpack("<IHB", log[at : at + _HEADER])
        content += log[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_WHOLE, _LAST):
            yield content
            content = b""
