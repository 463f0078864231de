"""TFRecord files of images, as the ImageNet scripts of TensorFlow and TFDS write them.

A record is its length (8 bytes), a checksum of that, an `Example`, and a checksum of this. The
features that are read are

    image/encoded, image/class/label, image/class/synset    labels count from 1, 0 is unused
    image, label                                             TFDS: labels count from 0
    image, class or target                                   Kaggle: the same

where `synset`, the class's name, may be left out; other features are ignored.
"""

import re
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

from crc32c import crc32c

from trainyard.data.formats.example import (
    BufferedReader,
    Span,
    find_features,
    one_bytes,
    one_int,
    one_text,
)
from trainyard.data.formats.format import Format
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.scan import (
    MAX_CLASSES,
    FileRows,
    Scan,
    in_threads,
    num_threads,
    scan_of_files,
)
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Source, checksum
from trainyard.errors import DataError

_NAME = re.compile(r"-\d+-of-\d+(\.tfrecords?)?$|\.tfrec(ords?)?$")
_HEAD, _TAIL = 12, 4  # bytes of a record before and after its data
_GZIP = b"\x1f\x8b"

_IMAGE, _LABEL, _SYNSET = b"image/encoded", b"image/class/label", b"image/class/synset"
_TFDS_IMAGE, _TFDS_LABEL, _OTHER_LABELS = b"image", b"label", (b"class", b"target")
_FEATURES = frozenset((_IMAGE, _LABEL, _SYNSET, _TFDS_IMAGE, _TFDS_LABEL, *_OTHER_LABELS))


def recognises(place: ResolvedLocation) -> bool:
    """True if the first file of a location is framed like a TFRecord."""
    names = _shards(place)
    if not names:
        return False
    with open_source(place.path(names[0])) as source:
        if source.size < _HEAD + _TAIL:
            return False
        head = source.read(0, _HEAD)
    is_compressed = head.startswith(_GZIP) and _NAME.search(names[0]) is not None
    return _length_is_sound(head) or is_compressed  # a scan then reports the compression


def scan(place: ResolvedLocation) -> Scan:
    """The samples of a location, file by file; DataError for a damaged record."""
    names = _shards(place)
    classes: list[str] = []
    found = in_threads(num_threads(place), partial(_read_shard, place), names)
    rows = _rows(found, classes)
    return scan_of_files(place, names, rows, format="tfrecord", classes=classes, left_out=LeftOut())


def check_shard(source: Source) -> None:
    """Compares the checksum of every record. DataError if one does not match its data."""
    for record in _records(BufferedReader(source)):
        begin, end = record.data
        if source.read(end, _TAIL) != _masked(checksum(source, begin, end)):
            raise record.wrong(
                "tfrecord.wrong-checksum",
                "{path}: record {record}, byte {offset}: its checksum does not match its data",
            )


# --- reading ---


class _Record(NamedTuple):
    path: str
    number: int  # from 1
    start: int  # byte of the length
    data: Span

    @property
    def wrong(self) -> Callable[..., DataError]:
        """Makes an error of this record."""
        return partial(DataError, path=self.path, record=self.number, offset=self.start)


def _shards(place: ResolvedLocation) -> tuple[str, ...]:
    named = tuple(name for name in place.names if _NAME.search(name))
    return named or (() if place.is_folder else place.names)


_Synsets = dict[int, str] | None
"""The class names by label; None unless every record has one."""


def _rows(shards: Iterable[tuple[FileRows, _Synsets]], classes: list[str]) -> Iterator[FileRows]:
    """The samples; once exhausted, `classes` holds the names if every record has one."""
    known: _Synsets = {}
    highest = -1
    for rows, found in shards:
        known = None if known is None or found is None else _united(known, found, rows.path)
        highest = max(highest, *rows.labels, -1)
        yield rows
    if known and len(known) == highest + 1:
        classes.extend(known[label] for label in range(len(known)))


def _united(known: dict[int, str], found: dict[int, str], name: str) -> dict[int, str]:
    """The united class names by label. DataError if a label has two names or the reverse."""
    united = known | found
    for label, synset in known.items():
        if united[label] != synset:
            raise _named_twice(name, label, united[label], synset)
    if len(set(united.values())) < len(united):
        raise DataError(
            "tfrecord.class-numbered-twice",
            "{path}: gives one image/class/synset two labels",
            path=name,
        )
    return united


def _named_twice(path: str, label: int, name: str, other: str) -> DataError:
    return DataError(
        "tfrecord.label-named-twice",
        "{path}: label {label} is {name!r} here, {other!r} elsewhere",
        path=path,
        label=label + 1,
        name=name,
        other=other,
    )


def _read_shard(place: ResolvedLocation, name: str) -> tuple[FileRows, _Synsets]:
    offsets, sizes, labels = array("q"), array("q"), array("i")
    synsets: _Synsets = {}
    with open_source(place.path(name)) as source:
        data = BufferedReader(source)
        for record in _records(data):
            try:
                (start, end), label, synset = _sample(data, record)
                if synset is None:
                    synsets = None
                elif synsets is not None and synsets.setdefault(label, synset) != synset:
                    raise _named_twice(data.name, label, synset, synsets[label])
            except ValueError as error:
                raise record.wrong(
                    "tfrecord.bad-record",
                    "{path}: record {record}, byte {offset}: {reason}",
                    reason=str(error),
                ) from None
            offsets.append(start)
            sizes.append(end - start)
            labels.append(label)
    return FileRows(name, offsets, sizes, labels), synsets


def _records(data: BufferedReader) -> Iterator[_Record]:
    """The positions of a file's records, by their lengths alone."""
    position, number = 0, 1
    while position < data.size:
        record = _Record(data.name, number, position, (position + _HEAD, position + _HEAD))
        if position + _HEAD + _TAIL > data.size:
            raise record.wrong(
                "tfrecord.truncated",
                "{path}: record {record}, byte {offset}: the file is truncated",
            )
        head = data.read(position, _HEAD)
        if not _length_is_sound(head):
            if not position and head.startswith(_GZIP):
                raise DataError(
                    "tfrecord.compressed",
                    "{path}: the file is compressed; unpack it with gunzip",
                    path=data.name,
                )
            raise record.wrong(
                "tfrecord.damaged-length",
                "{path}: record {record}, byte {offset}: the checksum of the length does not "
                "match (damaged)",
            )
        length = int.from_bytes(head[:8], "little")
        end = position + _HEAD + length
        if end + _TAIL > data.size:
            raise record.wrong(
                "tfrecord.truncated-record",
                "{path}: record {record}, byte {offset}: the file is truncated inside a record of "
                "{size:,} bytes",
                size=length,
            )
        yield record._replace(data=(position + _HEAD, end))
        position, number = end + _TAIL, number + 1


def _length_is_sound(head: bytes) -> bool:
    return _masked(crc32c(head[:8])) == head[8:]


def _masked(checksum: int) -> bytes:
    """A CRC-32C as TFRecord stores it: rotated and offset, since the data may hold CRCs itself."""
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def _sample(data: BufferedReader, record: _Record) -> tuple[Span, int, str | None]:
    """The span of the image, the label from 0, and the class's name or None."""
    found = find_features(data, record.data, _FEATURES)
    numbers = [_TFDS_LABEL] if _TFDS_LABEL in found else found.keys() & {*_OTHER_LABELS}
    if _IMAGE in found and _LABEL in found:
        image, label_name = _IMAGE, _LABEL
    elif _TFDS_IMAGE in found and len(numbers) == 1:
        image, (label_name,) = _TFDS_IMAGE, numbers
    else:
        raise record.wrong(
            "tfrecord.missing-features",
            "{path}: record {record}, byte {offset}: expected the features image/encoded and "
            "image/class/label, or image and one of label, class and target; found {names}",
            names=" and ".join(sorted(name.decode() for name in found)) or "none of these",
        )
    label = _label(data, record, found, label_name)
    where = _read(one_bytes, data, found, image)
    if label_name != _LABEL:
        return where, label, None
    return where, label, _read(one_text, data, found, _SYNSET) if _SYNSET in found else None


def _label(data: BufferedReader, record: _Record, found: dict[bytes, Span], feature: bytes) -> int:
    """The label from 0. DataError if the feature holds none."""
    stored = _read(one_int, data, found, feature)
    if stored == 0 and feature == _LABEL:
        raise record.wrong(
            "tfrecord.label-0",
            "{path}: record {record}, byte {offset}: image/class/label is 0, which that layout "
            "leaves unused, since it counts from 1; store labels that count from 0 as the "
            "features image and label",
        )
    label = stored - (feature == _LABEL)
    if not 0 <= label < MAX_CLASSES:
        raise record.wrong(
            "tfrecord.not-a-class-number",
            "{path}: record {record}, byte {offset}: {feature} is {value}, which is not a class "
            "number",
            feature=feature.decode(),
            value=stored,
        )
    return label


_Value = TypeVar("_Value")


def _read(
    read: Callable[[BufferedReader, Span], _Value],
    data: BufferedReader,
    found: dict[bytes, Span],
    name: bytes,
) -> _Value:
    try:
        return read(data, found[name])
    except ValueError as error:
        raise ValueError(f"{name.decode()} {error}") from None


FORMAT = Format(
    name="tfrecord",
    recognises=recognises,
    scan=scan,
    patterns=("*-of-*", "*.tfrecord", "*.tfrecords", "*.tfrec"),
    check_shard=check_shard,
)
