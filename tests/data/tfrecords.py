"""TFRecord files, by an encoder of protobuf that knows no schema."""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from crc32c import crc32c

from trainyard.data.formats.scan import EncodedSample


def number(value: int) -> bytes:
    encoded = b""
    while value > 127:
        encoded += bytes([value % 128 + 128])
        value //= 128
    return encoded + bytes([value])


def block(field: int, content: bytes) -> bytes:
    return number(field << 3 | 2) + number(len(content)) + content


def feature(name: bytes, content: bytes) -> bytes:
    return block(1, block(1, name) + block(2, content))


def bytes_feature(name: bytes, *values: bytes) -> bytes:
    return feature(name, block(1, b"".join(block(1, value) for value in values)))


def int_feature(name: bytes, *values: int, packed: bool = True) -> bytes:
    if packed:
        return feature(name, block(3, block(1, b"".join(map(number, values)))))
    return feature(name, block(3, b"".join(b"\x08" + number(value) for value in values)))


def example(*features: bytes) -> bytes:
    return block(1, b"".join(features))


def masked(content: bytes) -> bytes:
    checksum = crc32c(content)
    rotated = ((checksum >> 15) | (checksum << 17)) % 2**32
    return struct.pack("<I", (rotated + 0xA282EAD8) % 2**32)


def record(content: bytes, length: int | None = None) -> bytes:
    head = struct.pack("<Q", len(content) if length is None else length)
    return head + masked(head) + content + masked(content)


def write_records(path: Path, contents: Iterable[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(record, contents)))
    return path


def write_samples(
    path: Path, samples: Iterable[EncodedSample], classes: Sequence[str] | None
) -> None:
    """Writes a shard as the ImageNet scripts do; arguments as of the `write` of other formats."""
    contents = []
    for sample in samples:
        features = [int_feature(b"image/class/label", sample.label + 1)]
        if classes is not None:
            name = classes[sample.label].encode(errors="surrogateescape")
            features.append(bytes_feature(b"image/class/synset", name))
        contents.append(example(*features, bytes_feature(b"image/encoded", sample.image)))
    write_records(path, contents)
