"""WebDataset shards: tars in which consecutive members of one key are one sample.

A key is the member's path up to the first dot of its base name. A sample is an image and its label:
`.cls`, as ASCII digits (webdataset's writer) or 8 little-endian bytes, or else "label" or "cls" of
a `.json`: a whole number, a list of them for any number of labels, or the name of the class.
"class_name" there names a number, or the class. Other members with the key of a sample are fields
of it, which are not read; those of no sample are left out and counted.
"""

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple
from zlib import adler32

from trainyard.data.formats.class_tar import check_all_read
from trainyard.data.formats.format import Format, Shards
from trainyard.data.formats.left_out import DOTTED, RESERVED, LeftOut
from trainyard.data.formats.scan import (
    ARRAY_SUFFIX,
    IMAGE_SUFFIXES,
    MAX_CLASSES,
    EncodedSample,
    FileRows,
    FileScan,
    Scan,
    all_rows,
    in_threads,
    num_threads,
    reading_pool,
    scan_of_files,
)
from trainyard.data.formats.tar import (
    END,
    BufferedTarReader,
    Member,
    SequentialReader,
    find_header,
    members,
    walk,
    why_left_out,
)
from trainyard.data.storage.ahead import map_ahead
from trainyard.data.storage.location import ResolvedLocation
from trainyard.data.storage.open import open_source
from trainyard.data.storage.source import Source, is_remote
from trainyard.errors import DataError

_IMAGES = IMAGE_SUFFIXES | {ARRAY_SUFFIX}
_WALKERS = 192  # parts of remote shards that are walked at once
_MIN_SEGMENT, _MAX_SEGMENT = 1 << 20, 16 << 20  # bytes; a segment of a remote shard
_REMOTE_AHEAD, _REMOTE_PAGE = 2 << 20, 8 << 10  # bytes; see BufferedTarReader
_MAX_JSON = 1 << 20  # bytes; a larger file is no label
_KEYS, _NAME = ("label", "cls"), "class_name"  # in a .json; the first has precedence
_IN_JSON = re.compile("|".join(f'"{key}"' for key in (*_KEYS, _NAME)).encode())
_PEEKED = 64  # members: some samples, and other members before the first
_RESERVED = re.compile(r"__[^/]*__($|/)")  # webdataset's own, for data about the shard


def recognises(place: ResolvedLocation) -> bool:
    """True if the first non-empty tar begins with labelled images, or if all tars are empty."""
    names = place.files(".tar")
    for name in names:
        with BufferedTarReader(open_source(place.path(name))) as tar:
            found = list(islice(members(tar), _PEEKED))
        if found:
            return _are_samples(found)
    return bool(names)


def scan(place: ResolvedLocation) -> Scan:
    """The samples of a location, shard by shard; DataError for a damaged tar."""
    names = place.files(".tar")
    check_all_read(place)
    found = in_threads(num_threads(place), partial(_read_shard, place), names)
    if is_remote(place.root):
        found = read_remote(place, names)
    left_out, classes, beside = LeftOut(), list[str](), dict[int, str]()
    rows = all_rows(_named(found, place, classes, beside), left_out)
    scan = scan_of_files(
        place, names, rows, format="webdataset", classes=classes, left_out=left_out
    )
    return replace(scan, beside=beside)


class _Found(NamedTuple):
    """What a shard holds."""

    rows: list[FileRows]
    left_out: LeftOut
    texts: dict[str, int]
    """The labels of the rows that are texts, by the numbers that stand for them there."""
    beside: dict[int, str]
    """The names beside labels that are numbers; "" for a number of several names."""


def _named(
    found: Iterable[_Found], place: ResolvedLocation, classes: list[str], beside: dict[int, str]
) -> Iterator[FileScan]:
    """The rows of all shards; once exhausted, `classes` and `beside` hold the names in them.

    DataError if some shards have texts for labels, and others numbers.
    """
    known, kinds = dict[str, int](), set[bool]()
    for one in found:
        (rows,) = one.rows
        kinds |= {bool(one.texts)} if rows.sizes else set()
        if len(kinds) > 1:
            raise DataError(
                "webdataset.mixed-shards",
                "{path}: some shards before it have numbers for labels and some names",
                path=place.path(rows.path),
            )
        for number, name in one.beside.items():
            beside[number] = name if beside.get(number, name) == name else ""
        numbers = [known.setdefault(text, len(known)) for text in one.texts]
        labels = [numbers[label] for label in rows.labels] if numbers else rows.labels
        yield FileScan([rows._replace(labels=labels)], one.left_out)
    classes.extend(known)


class _Part(NamedTuple):
    """A member of a key."""

    key: str
    field: str  # "" for neither an image nor a label
    member: Member
    content: bytes  # of a label, and of an image if requested


def _are_samples(found: list[Member]) -> bool:
    fields: dict[str, set[str]] = {}
    dotted: dict[str, set[str]] = {}
    for member in found:
        key, field = _split(member.name)
        fields.setdefault(key, set()).add(field)
        if "/" not in member.name.removeprefix("./"):  # else its folder may be its class
            key, dot, suffix = member.name.rpartition(".")
            dotted.setdefault(key, set()).add((dot + suffix).lower())
    return any(".cls" in f or (".json" in f and f & _IMAGES) for f in fields.values()) or any(
        ".cls" in f and f & _IMAGES for f in dotted.values()
    )


def _read_shard(place: ResolvedLocation, name: str) -> _Found:
    path = place.path(name)
    with BufferedTarReader(open_source(path)) as tar:
        return _grouped(name, path, _parts(tar, members(tar)))


def _grouped(name: str, path: str, parts: Iterable["_Part"]) -> _Found:
    """The samples of a shard."""
    offsets, sizes, labels, counts = array("q"), array("q"), array("i"), array("i")
    texts, beside = dict[str, int](), dict[int, str]()
    shard, kinds = _Shard(path), set[type]()
    for key, some in shard.samples(parts):
        image, label, class_name = _sample(some, path, key)
        offsets.append(image.member.offset)
        sizes.append(image.member.size)
        kinds.add(type(label))
        if len(kinds) > 1:
            raise DataError(
                "webdataset.mixed-labels",
                "{path}: sample {sample!r}: its label is of another kind than those before it: "
                "labels are numbers, names or lists of numbers",
                path=path,
                sample=key,
            )
        if isinstance(label, list):
            labels.extend(label)
            counts.append(len(label))
        elif isinstance(label, str):
            labels.append(texts.setdefault(label, len(texts)))
        else:
            labels.append(label)
            if beside.setdefault(label, class_name) != class_name:
                beside[label] = ""
    rows = [FileRows(name, offsets, sizes, labels, counts=counts or None)]
    return _Found(rows, shard.left_out(), texts, beside)


class _Shard:
    """Sorts the members of a shard into those of samples and those that are left out."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._keys: set[str] = set()
        self._others: dict[str, list[str]] = {}
        """Names of members that are neither image nor label, by keys that are of no sample yet."""

    def samples(self, parts: Iterable[_Part]) -> Iterator[tuple[str, list[_Part]]]:
        """The key, and the image and label, of each sample. DataError for a key that returns."""
        for key, some in groupby(self._needed(parts), key=attrgetter("key")):
            sample = list(some)
            if key in self._keys:
                raise DataError(
                    "webdataset.sample-stored-twice",
                    "{path}: sample {sample!r} is stored twice, as `tar -r` does for a newer one: "
                    "write the shard anew, with a key for each sample",
                    path=self._path,
                    sample=key,
                )
            self._keys.add(key)
            self._others.pop(key, None)
            yield key, sample

    def left_out(self) -> LeftOut:
        """What belongs to no sample; names with a dot too many count without their suffix."""
        left_out = LeftOut()
        for key, names in self._others.items():
            dotted = {name.rpartition(".")[0]: None for name in names if _is_dotted(key, name)}
            for name in dotted:
                left_out.add(DOTTED, name)
            for name in names:
                if not _is_dotted(key, name):
                    kind = RESERVED if _RESERVED.match(name) else why_left_out(name)
                    left_out.add(kind, name)
        return left_out

    def _needed(self, parts: Iterable[_Part]) -> Iterator[_Part]:
        for part in parts:
            if part.field:
                yield part
            elif part.key not in self._keys:
                self._others.setdefault(part.key, []).append(part.member.name)


def _is_dotted(key: str, name: str) -> bool:
    """True for an image or a label but for a dot in its name: `IMG.0001.jpg`."""
    stem, _, suffix = name[len(key) + 1 :].lower().rpartition(".")
    return bool(stem) and (f".{suffix}" in _IMAGES or suffix == "cls")


# --- remote shards: every header costs a request, so many parts are walked at once ---


class _Segment(NamedTuple):
    """A part of a shard that one thread walks."""

    tar: Source
    start: int
    until: int


class _Walked(NamedTuple):
    first: int | None  # position of the first header
    parts: list[_Part]
    next: int  # position of the header after the last


def read_remote(
    place: ResolvedLocation, names: Sequence[str], *, segment: int | None = None
) -> Iterator[_Found]:
    """The samples of shards, of which many segments are walked at once.

    `segment`: its length in bytes, a multiple of 512; by default it follows from the sizes.
    """
    with reading_pool(_WALKERS) as pool:
        tars = list(pool.map(open_source, map(place.path, names)))
        length = sum(tar.size for tar in tars) // _WALKERS
        length = min(max(length, _MIN_SEGMENT), _MAX_SEGMENT) // _BLOCK * _BLOCK
        segments = [_segments(tar, segment or length) for tar in tars]
        walked = map_ahead(pool, _guessed, chain.from_iterable(segments), most=2 * _WALKERS)
        for name, tar, some in zip(names, tars, segments, strict=True):
            yield _grouped(name, tar.name, _joined(some, islice(walked, len(some))))


def _segments(tar: Source, length: int) -> list[_Segment]:
    starts = range(0, max(tar.size, 1), length)
    return [_Segment(tar, start, min(start + length, tar.size)) for start in starts]


def _guessed(segment: _Segment) -> _Walked:
    """Walks a segment from the first block that looks like a header."""
    tar = BufferedTarReader(segment.tar, ahead=_REMOTE_AHEAD, page=_REMOTE_PAGE)
    if not segment.start:
        return _walked(segment, tar, 0)
    first = find_header(tar, segment.start, segment.until)
    if first is not None:
        try:
            return _walked(segment, tar, first)
        except DataError:  # it was no header; if it was one, the second walk raises the error again
            pass
    return _Walked(None, [], 0)


def _walked(segment: _Segment, tar: BufferedTarReader, first: int) -> _Walked:
    position = first

    def found() -> Iterator[Member]:
        nonlocal position
        position = yield from walk(tar, first, until=segment.until, end=tar.size)

    parts = list(_parts(tar, found()))
    return _Walked(first, parts, position)


def _joined(segments: list[_Segment], guesses: Iterator[_Walked]) -> Iterator[_Part]:
    """The parts of a shard; walks a segment again if its first header was guessed wrong."""
    position = 0
    for segment, guess in zip(segments, guesses, strict=True):
        if segment.until <= position < END:  # inside one long member
            continue
        if position < END:
            walked = guess
            if guess.first != position:
                tar = BufferedTarReader(segment.tar, ahead=_REMOTE_AHEAD, page=_REMOTE_PAGE)
                walked = _walked(segment, tar, position)
            yield from walked.parts
            position = walked.next
    if position < END:
        last = segments[-1].tar
        yield from _parts(tar := BufferedTarReader(last), members(tar, position))


class Streamed(NamedTuple):
    """A sample of a tar that is read as a stream."""

    key: str
    offset: int  # bytes from the start of the tar to the image
    image: bytes
    label: int


def streamed(tar: SequentialReader, left_out: LeftOut) -> Iterator[Streamed]:
    """The samples of a shard in stored order; reads the shard to its end.

    Adds to `left_out` what belongs to no sample.
    """
    shard = _Shard(tar.name)
    for key, parts in shard.samples(_parts(tar, members(tar), images=True)):
        image, label, _ = _sample(parts, tar.name, key)
        if not isinstance(label, int):
            raise DataError(
                "stream.label-lists",
                "{path}: sample {sample!r} has a list of labels, or a name, which data.order = "
                "'join' does not read: use another order",
                path=tar.name,
                sample=key,
            )
        yield Streamed(key, image.member.offset, image.content, label)
    tar.finish()
    left_out.update(shard.left_out())


def _parts(
    tar: BufferedTarReader | SequentialReader, found: Iterable[Member], *, images: bool = False
) -> Iterator[_Part]:
    """The members. `images`: with the content of images, not only of labels."""
    for member in found:
        key, field = _split(member.name)
        content = b""
        if field in _IMAGES:
            content = tar.read(member.offset, member.size) if images else b""
        elif field == ".cls":
            content = tar.read(member.offset, min(member.size, 32))
        elif field == ".json" and member.size <= _MAX_JSON:
            content = tar.read(member.offset, member.size)
            field = field if _IN_JSON.search(content) else ""
        else:
            field = ""
        yield _Part(key, field, member, content)


def _split(name: str) -> tuple[str, str]:
    """The key and the rest in lower case: ".jpg" is the image, ".seg.png" is not.

    The rest is empty for a name without a key, such as the `._name` that macOS adds to tars.
    """
    dot = name.find(".", name.rfind("/") + 1)
    if dot < 1 or name[dot - 1] == "/" or (name.startswith("__") and _RESERVED.match(name)):
        return name, ""
    return name[:dot], name[dot:].lower()


def _sample(parts: list[_Part], path: str, key: str) -> tuple[_Part, int | list[int] | str, str]:
    """The image, the label and the name beside a number ("" without) among the parts of one key.

    The label is a number, a list of them, or a name. An array counts where there is no other image.
    """
    images = [part for part in parts if part.field in IMAGE_SUFFIXES]
    images = images or [part for part in parts if part.field == ARRAY_SUFFIX]
    labels = [part for part in parts if part.field == ".cls"]
    labels = labels or [part for part in parts if part.field == ".json"]
    if len(images) != 1 or len(labels) != 1:
        found = ", ".join(part.member.name for part in parts)
        raise DataError(
            "webdataset.incomplete-sample",
            "{path}: sample {sample!r}: expected one image and one label (.cls, or .json with "
            '"label"), found {names}',
            path=path,
            sample=key,
            names=found,
        )
    label: int | list[int] | str
    if labels[0].field == ".json":
        label, name = _from_json(labels[0].content)
    else:
        label, name = _ascii_or_binary(labels[0].content), ""
    numbers = [] if isinstance(label, str) else [label] if isinstance(label, int) else label
    if not all(0 <= one < MAX_CLASSES for one in numbers):
        shown = repr(labels[0].content[:60])
        raise DataError(
            "webdataset.not-a-class-number",
            "{path}: sample {sample!r}: {value} in {suffix} is not a class number",
            path=path,
            sample=key,
            value=shown,
            suffix=labels[0].field,
        )
    return images[0], label, name


def _ascii_or_binary(content: bytes) -> int:
    digits = content.strip()
    if digits.isdigit():
        return int(digits)
    return int.from_bytes(content, "little", signed=True) if len(content) == 8 else -1


def _from_json(content: bytes) -> tuple[int | list[int] | str, str]:
    """The label, as in timm's shards, and the name beside a number; -1 without a label."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return -1, ""
    tree = tree if isinstance(tree, dict) else {}
    name = tree.get(_NAME)
    name = name.strip() if isinstance(name, str) else ""
    label = next((tree[key] for key in _KEYS if tree.get(key) is not None), name or -1)
    if isinstance(label, list) and all(type(one) is int for one in label):
        return label, ""
    if isinstance(label, str) and label.strip():
        return label.strip(), ""
    return label if type(label) is int else -1, name


# --- writing ---

_BLOCK = 512  # bytes
_RECORD = 20 * _BLOCK  # tar pads an archive to a multiple of this
_BUFFER = 1 << 17  # bytes; with 1 MiB, fresh pages cost the kernel up to four times as much
# A header except name, size and checksum, whose field counts as spaces: a file that all may
# read, of user 0, from 1970.
_HEADER = (
    b"%b"
    + b"0000444\0" + b"0000000\0" * 2 + b"%011o\0" + b"00000000000\0" + b"        " + b"0"
    + bytes(100) + b"ustar\00000" + b"trainyard".ljust(32, b"\0") * 2
    + bytes(8 + 8 + 155 + 12)
)  # fmt: skip


def write(path: Path, samples: Iterable[EncodedSample], classes: Sequence[str] | None) -> None:
    """Writes a shard: `KEY.cls`, then the image, of each sample; equal samples give equal bytes.

    A list of labels is in `KEY.json` instead. The names of the classes lie beside the shards, in
    `dataset.json`.
    """
    size = 0
    with open(path, "wb", buffering=_BUFFER) as file:
        for image, suffix, label, key, labels in samples:
            name, text = f"{key}.cls", b"%d" % label
            if labels is not None:
                name, text = f"{key}.json", json.dumps({"label": labels}).encode()
            before = (
                _header(name, len(text))
                + text
                + bytes(-len(text) % _BLOCK)
                + _header(key + suffix, len(image))
            )
            padding = bytes(-len(image) % _BLOCK)
            file.write(before)
            file.write(image)
            file.write(padding)
            size += len(before) + len(image) + len(padding)
        end = size + 2 * _BLOCK
        file.write(bytes(end - size + -end % _RECORD))


def _header(name: str, size: int) -> bytes:
    raw = name.encode("utf-8", "surrogateescape")
    if len(raw) > 100:
        raise DataError(
            "webdataset.name-too-long",
            "{name}: a name in a WebDataset shard has at most 100 bytes",
            name=name,
        )
    header = _HEADER % (raw.ljust(100, b"\0"), size)
    checksum = (adler32(header) & 0xFFFF) - 1  # the sum of the bytes, here below 65521
    return b"%b%06o\0 %b" % (header[:148], checksum, header[156:])


FORMAT = Format(
    name="webdataset",
    recognises=recognises,
    scan=scan,
    patterns=("*.tar",),
    kind="tar",
    shards=Shards(
        write=write,
        name=lambda name, split, _: (f"{name}-{split}-", 6, ".tar"),
        overhead=2304,  # headers and padding
        holds_lists=True,
    ),
)
