"""Writes shards in worker processes that import no torch and end with their parent."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trainyard.data._native import is_built, own_decoder
from trainyard.data.decode.decode import (
    BadImageError,
    image_orientation,
    is_deep_file,
    is_grey_file,
    reference_image,
)
from trainyard.data.decode.orientation import upright
from trainyard.data.decode.packed_record import has_pixels, image_file, is_record, record_of_pixels
from trainyard.data.formats.scan import EncodedSample
from trainyard.data.index.outside import look_outside
from trainyard.data.index.table import Index, load_index
from trainyard.data.reading.reader import Reader, read_ahead
from trainyard.data.storage.manifest import Shard
from trainyard.data.storage.source import is_remote
from trainyard.datasets.pack.files import Outputs, remove, write_folder
from trainyard.datasets.pack.journal import Written
from trainyard.datasets.pack.recode import (
    NOT_AN_IMAGE,
    Recode,
    ShortSide,
    is_plain_jpeg,
    oddity,
    suffix_of,
)
from trainyard.datasets.pack.shards import PackOptions, ShardJob, written_as
from trainyard.datasets.workers import CONTEXT
from trainyard.errors import DataError
from trainyard.files import fsync, part_of, sha256, why_unwritable
from trainyard.installation import NEEDS_EXTENSION


@dataclass(frozen=True)
class SampleEncoder:
    """The conversion of each image by the options of a pack."""

    recode: Recode | None
    packs: bool  # True: into records
    pixels: bool

    @property
    def keeps_files(self) -> bool:
        """True if image files are not changed."""
        return self.recode is None and not self.packs

    def __call__(self, content: bytes) -> bytes:
        """The bytes to store. BadImageError if decoding is necessary and fails."""
        is_of_kind = not self.packs or (is_record(content) and has_pixels(content) == self.pixels)
        if self.recode is None and is_of_kind and is_record(content) == self.packs:
            return content
        try:
            image = image_file(content)
        except ValueError as error:  # a damaged record
            raise BadImageError(str(error)) from None
        if self.pixels:
            return _of_pixels(image, self.recode)
        if self.recode is not None:
            image = self.recode(image)
        return _of_coefficients(image) if self.packs else image


def storing(options: PackOptions) -> SampleEncoder:
    """The conversion by `options`. DataError if it needs the missing C extension."""
    packs = options.format == "packed"
    if packs and not options.pixels and not is_built():
        raise DataError("data.needs-c-extension", name="packing coefficients", hint=NEEDS_EXTENSION)
    return SampleEncoder(options.recode, packs, options.pixels)


def _of_coefficients(image: bytes) -> bytes:
    """A record of coefficients; a file that a record cannot represent is not changed."""
    decoder = own_decoder()
    assert decoder is not None  # checked by `storing`
    return decoder.pack(image) or image


def _of_pixels(image: bytes, recode: Recode | None) -> bytes:
    """A record of upright pixels, as it holds no EXIF; scaled without an intermediate JPEG."""
    stored = reference_image(image, 1 if is_grey_file(image) else 3)
    pixels = upright(stored, image_orientation(image))
    if isinstance(recode, ShortSide):
        pixels = recode.scaled(pixels)
    try:
        return record_of_pixels(np.asarray(pixels))
    except ValueError as error:
        raise BadImageError(str(error)) from None


_COUNT_EVERY = 64  # samples between updates of the counter, which all workers share


@dataclass(frozen=True)
class PackSource:
    index: Path
    fingerprint: str
    keeps_names: bool
    """True if images keep the base names of their files."""


@dataclass(frozen=True)
class PackJob:
    """The data shared by all shards of a pack."""

    destination: Path
    options: PackOptions
    classes: tuple[str, ...] | None
    folders: tuple[str, ...]
    """Folder names of the classes, in the folder format."""
    sources: dict[str, PackSource]  # by split


class PackStopped(Exception):
    """The pack was stopped."""


class Signals:
    """Shared values of the parent and its workers: made by the parent, inherited by workers."""

    def __init__(self) -> None:
        self.count = CONTEXT.Value("q", 0)
        """Samples written by all workers."""
        self.stop = CONTEXT.RawValue("b", 0)

    def counted(self, written: int, total: int) -> None:
        """Updates the counter: a worker has written `written` of its shard's `total` samples."""
        step = _COUNT_EVERY if written % _COUNT_EVERY == 0 else 0
        if written == total:
            step = total % _COUNT_EVERY or _COUNT_EVERY
        if step:
            with self.count.get_lock():
                self.count.value += step


class _Worker:
    def __init__(self, work: PackJob, signals: Signals) -> None:
        self.work, self.signals = work, signals
        self.storing = storing(work.options)
        self._opened: dict[str, tuple[Index, Reader]] = {}

    def open(self, split: str) -> tuple[Index, Reader]:
        if split not in self._opened:
            source = self.work.sources[split]
            index = load_index(source.index)
            if index is None or index.fingerprint != source.fingerprint:
                raise DataError(
                    "pack.source-changed",
                    "{path}: has changed while its data was being packed",
                    path=source.index,
                )
            self._opened[split] = index, Reader(index)
        return self._opened[split]


_worker: _Worker


@dataclass
class _Seen:
    """Statistics of the images written into a shard."""

    odd: list[tuple[str, str]] = field(default_factory=list)
    image_bytes: int = 0


def begin(work: PackJob, signals: Signals) -> None:
    """Sets the work for `write_shard`."""
    global _worker
    _worker = _Worker(work, signals)


def write_shard(job: ShardJob) -> tuple[Written, Outputs]:
    """Writes and syncs a shard under a temporary name; also returns the renames that publish it."""
    final = _worker.work.destination / job.name
    part = part_of(final)
    outputs = [(part, final)]
    seen = _Seen()
    try:
        _write(job, outputs, seen)
        for path, _ in outputs:
            fsync(path)
        shard = Shard(job.name, len(job.ids), part.stat().st_size, sha256(part))
    except OSError as error:
        index, _ = _worker.open(job.split)
        reason = why_unwritable(error, final, int(index.size[job.ids].sum()), part)
        remove(outputs)
        raise DataError(
            "pack.shard-unwritable",
            "{path}: cannot be written ({reason}); complete shards stay, and the same command "
            "resumes",
            path=final,
            reason=reason,
        ) from None
    except BaseException:
        remove(outputs)
        raise
    return Written(shard, seen.image_bytes, seen.odd), outputs


def _write(job: ShardJob, outputs: Outputs, seen: _Seen) -> None:
    work, part = _worker.work, outputs[0][0]
    part.parent.mkdir(parents=True, exist_ok=True)
    samples = _samples(job, seen)
    if (write := written_as(work.options.format).write) is not None:
        write(part, samples, work.classes)
        return
    folders = [f"{job.split}/{name}" for name in work.folders]
    write_folder(part, samples, work.destination, folders)


def _samples(job: ShardJob, seen: _Seen) -> Iterator[EncodedSample]:
    source = _worker.work.sources[job.split]
    index, reader = _worker.open(job.split)
    storing, signals = _worker.storing, _worker.signals
    contents = read_ahead(reader, job.ids)
    for number, (sample, label, content) in enumerate(
        zip(job.ids.tolist(), job.labels.tolist(), contents, strict=True), job.first
    ):
        if signals.stop.value:
            raise PackStopped
        if isinstance(content, OSError):
            raise _unreadable(index, sample, content)
        if not is_plain_jpeg(content) and not is_record(content):
            where = _where(index, reader, sample)
            kind = oddity(content, where)
            if kind == NOT_AN_IMAGE:
                _check_inside(index, sample)
            seen.odd.extend([(kind, where)] if kind else [])
            if (storing.recode is not None or storing.pixels) and is_deep_file(content):
                raise DataError(
                    "pack.more-than-8-bits",
                    "{path}: has more than 8 bits a channel, of which --short and --pixels keep 8: "
                    "pack without them, or store 8 bits of your range first",
                    path=where,
                )
        image, is_damaged = _stored(storing, content)
        if is_damaged:
            seen.odd.append(("cannot be decoded", _where(index, reader, sample)))
        seen.image_bytes += len(image)
        key = stem(index, reader, sample) if source.keeps_names else f"{number:08d}"
        labels = None if index.lists is None else index.lists.of(label)
        yield EncodedSample(image, suffix_of(image), label, key, labels)
        signals.counted(number - job.first + 1, len(job.ids))


def _unreadable(index: Index, sample: int, error: OSError) -> DataError:
    name, offset, _ = index.locate(sample)
    return DataError(
        "pack.sample-unreadable",
        "{path}, byte {offset}: sample {sample} cannot be read ({reason}); a pack leaves nothing "
        "out: repair the sample or remove it from the source",
        path=name,
        offset=offset,
        sample=sample,
        reason=str(error),
    )


def _check_inside(index: Index, sample: int) -> None:
    """DataError if a link leads out of the data to a file that is no image: it may be private."""
    name = index.file_names[int(index.file[sample])]
    outside = None if is_remote(index.locate(sample)[0]) else look_outside(index)(name)
    if outside is not None:
        raise DataError(
            "pack.link-leaves-data",
            "{path}: leads to {target}, outside of the data, which is no image: remove the link",
            path=os.path.join(index.root, name),
            target=outside,
        )


def _stored(storing: SampleEncoder, content: bytes) -> tuple[bytes, bool]:
    """The bytes to store and False, or the old bytes and True if damaged: training skips them."""
    try:
        return storing(content), False
    except BadImageError:
        return content, True


def stem(index: Index, reader: Reader, sample: int) -> str:
    """The base name, without suffix, of a sample's own file or local tar member; else ""."""
    name = index.file_names[int(index.file[sample])]
    name_of_member = name if index.format in ("folder", "list") else _member(index, reader, sample)
    return os.path.splitext(os.path.basename(name_of_member))[0]


def _where(index: Index, reader: Reader, sample: int) -> str:
    """A sample's file relative to the root, with its tar member if it has one."""
    name = index.file_names[int(index.file[sample])]
    member, offset = _member(index, reader, sample), int(index.offset[sample])
    if member:
        return f"{name}: {member}"
    return f"{name}, byte {offset}" if offset else name


def _member(index: Index, reader: Reader, sample: int) -> str:
    """The name in the tar header before a sample; "" if there is none, or the file is remote."""
    path, offset, _ = index.locate(sample)
    if offset < 512 or is_remote(path):
        return ""
    header = reader.part_of_file(int(index.file[sample]), offset - 512, 512)
    is_header = header[257:262] == b"ustar"
    return header[:100].split(bytes(1))[0].decode(errors="replace") if is_header else ""
