"""Opens the indices and streams that the [data] section of a recipe names."""

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console

from trainyard.data._native import is_built
from trainyard.data.config import DataConfig, Locations
from trainyard.data.decode import lost
from trainyard.data.decode.seek_tables import seek_remark
from trainyard.data.index.build import Progress
from trainyard.data.index.corrections import corrected, read_corrections
from trainyard.data.index.label_space import match_classes, report
from trainyard.data.index.learnable import check_learnable, class_remarks
from trainyard.data.index.merge import open_merged
from trainyard.data.index.overlap import check_apart
from trainyard.data.index.splits import names_test
from trainyard.data.index.table import Index, into_cache, load_index
from trainyard.data.index.val_share import Side
from trainyard.data.storage.credentials import PIPE
from trainyard.data.storage.hub import is_on_hub
from trainyard.data.storage.location import find_place
from trainyard.data.storage.source import is_remote
from trainyard.data.stream.shards import Stream, list_shards
from trainyard.errors import DataError, RecipeError
from trainyard.files import atomic_write, cache_folder
from trainyard.installation import NEEDS_EXTENSION
from trainyard.printable import how_many, printable
from trainyard.world import World, broadcast, gather, in_turns, together

_SENT_AT_ONCE = 64 << 20


@dataclass(frozen=True)
class Datasets:
    train: Index | Stream
    val: Index

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each split, and "both" for a data set that the two divide."""
        both = {"both": self.val.whole} if self.val.whole else {}
        return {"train": self.train.fingerprint, "val": self.val.fingerprint} | both


class Source(NamedTuple):
    """Where the images of a split come from."""

    locations: Locations | None
    key: str
    """The recipe key that names the locations."""
    side: Side | None = None
    """The part of the locations; None for all of them."""
    corrections: str | None = None
    """The list of corrected labels."""

    def __str__(self) -> str:
        """The locations as text, for messages."""
        part = "" if self.side is None else f" (its {self.side.split} part)"
        return " and ".join(_listed(self.locations or ())) + part


def source_of(config: DataConfig, split: Literal["train", "val"]) -> Source:
    """The source of a recipe's training or validation images."""
    if config.val is not None or config.val_part is None or config.order == "join":
        return Source(getattr(config, split), f"data.{split}", None, config.corrections)
    side = Side(split, config.val_part, config.val_seed, config.group)
    return Source(config.train, "data.train", side, config.corrections)


def check_sources(config: DataConfig, world: World) -> None:
    """RecipeError if a split has no location, DataError if a local one does not exist.

    A quick check before the ranks meet; only a rank that is alone looks at the disk.
    """
    for split in ("train", "val"):
        source = source_of(config, split)
        if source.locations is None:
            raise RecipeError("recipe.data-not-set", key=source.key, hint=_how_to_set(source.key))
        for location in _listed(source.locations) if world.size == 1 else ():
            if not is_remote(location) and not location.startswith(PIPE):
                find_place(location)


def data_remarks(config: DataConfig, data: Datasets) -> list[str]:
    """Remarks about training and validation data that a user may not expect."""
    remarks = [
        f"{place}: test images, as there is no other validation data; --data.val_share 0.1 with "
        "--data.train keeps them for the end"
        for place in _listed(config.val or ())
        if names_test(place)
    ]
    if config.val is not None and config.val_part is not None:
        side = Side("val", config.val_part, config.val_seed)
        remarks.append(
            f"{side.key} = {side.part} is not used: validation images come from "
            f"{source_of(config, 'val')}"
        )
    if isinstance(data.train, Index):
        if config.corrections:
            remarks.append(_what_is_corrected(config.corrections, data.train, data.val))
        if not (data.train.has_names or data.val.has_names):
            remarks.append("no data names its classes: equal numbers are taken for equal classes")
        return remarks + class_remarks(data.train, data.val)
    if data.val.has_names:
        remarks.append(
            f"{source_of(config, 'train')}: label {data.train.numbers[0]} of the stream is taken "
            f"for class {data.val.classes[0]!r}, the first of the validation data"
        )
    return remarks


def _what_is_corrected(path: str, *data: Index) -> str:
    named, changed, left_out = (
        sum(counts) for counts in zip(*(one.corrected or (0, 0, 0) for one in data), strict=True)
    )
    text = f"{path}: {how_many(changed, 'image')} with another label, {left_out:,} left out"
    absent = len(read_corrections(path)) - named
    return text + (f"; {absent:,} of its rows are of no image here" if absent > 0 else "")


def trained_on(config: DataConfig, data: Locations | None) -> list[str]:
    """Remarks about locations to evaluate on that hold images which the run was trained on."""
    source = source_of(config, "val")
    places = {os.path.realpath(place) for place in _listed(source.locations or ())}
    return [
        f"{place}: holds the images that the run was trained on; without it, the command takes "
        "the run's own validation part"
        for place in _listed(data or ())
        if source.side is not None and os.path.realpath(place) in places
    ]


def open_datasets(config: DataConfig, world: World, progress: Progress) -> Datasets:
    """The recipe's data sets, checked to have the same classes and no image in common.

    A training stream has no index; it takes its classes from the validation data.
    """
    if config.order == "join":
        shards = _same_shards(config, world)
        val = open_split(source_of(config, "val"), world, progress)
        assert config.samples is not None
        numbers = val.numbers or tuple(range(len(val.classes)))
        datasets = Datasets(Stream(shards, config.samples, val.classes, numbers), val)
    else:
        _check_hub(config)
        source = source_of(config, "train")
        train = open_split(source, world, progress)
        with together(world):
            check_learnable(train, str(source))
        datasets = Datasets(train, open_validation(config, train.classes, world, progress))
    with together(world):
        if world.is_first:
            images = datasets.train
            check_apart(images.shards if isinstance(images, Stream) else images, datasets.val)
            _check_corrections(config, datasets)
    return datasets


def _check_corrections(config: DataConfig, data: Datasets) -> None:
    """DataError if the list of corrected labels is of other images."""
    if config.corrections and not (data.val.corrected or getattr(data.train, "corrected", ())):
        raise DataError(
            "data.corrections-of-other-images",
            "data.corrections = {path!r}: none of its files is in {train} or {val}",
            path=config.corrections,
            train=str(source_of(config, "train")),
            val=str(source_of(config, "val")),
        )


def _check_hub(config: DataConfig) -> None:
    """RecipeError if a random order would ask the Hub for every image by itself."""
    named = next((name for name in _listed(config.train or ()) if is_on_hub(name)), None)
    if named and config.order == "exact" and not (config.stage or config.locality):
        raise RecipeError(
            "recipe.random-order-on-hub",
            "{location}: the Hub is for large requests, not for one per image: set data.stage to "
            "a folder for a copy, such as $SLURM_TMPDIR, or data.locality = 8192",
            location=named,
        )


def _same_shards(config: DataConfig, world: World) -> tuple[str, ...]:
    """The shards of a stream. Every rank lists them and takes each size-th: lists must agree."""
    with together(world):
        shards = list_shards(config)
    digest = sha256("\n".join(shards).encode()).digest()
    first = broadcast(world, digest)
    with together(world):
        if digest != first:
            raise DataError(
                "data.differs-between-nodes",
                location=str(source_of(config, "train")),
                host=socket.gethostname(),
            )
    return shards


def open_validation(
    config: DataConfig, classes: Sequence[str], world: World, progress: Progress
) -> Index:
    """The index of the validation data, whose labels are numbers of the training `classes`.

    It may lack some of these. DataError for another class.
    """
    return open_split(source_of(config, "val"), world, progress, known=classes)


def open_labelled(
    locations: Locations, classes: Sequence[str], world: World, progress: Progress
) -> tuple[Index, list[int]]:
    """The index of other data to evaluate a model of `classes` on, and the model's class numbers.

    The labels in the index are numbers of the index's own classes; element i of the list is the
    model's number of class i.
    """
    source = Source(locations, "data.val")
    index = open_split(source, world, progress)
    with together(world):
        match = match_classes(classes, index.classes, str(source), has_names=index.has_names)
        return index, report(match) if world.is_first else match.numbers


def _listed(locations: Locations) -> tuple[str, ...]:
    return (locations,) if isinstance(locations, str) else locations


def open_split(
    source: Source, world: World, progress: Progress, *, known: Sequence[str] | None = None
) -> Index:
    """The index of a source on every rank; the first rank makes it, or checks the saved one.

    Several locations are merged; for `known` see `open_merged`.

    The other ranks do not check for changes, since a thousand ranks that look at a thousand folders
    overload a file server. A rank that cannot see the first rank's file, say in the cache of
    another node, makes its own index of local data, and receives that of remote ones: their index
    takes a request or more for each image.
    """
    if source.locations is None:
        raise RecipeError("recipe.data-not-set", key=source.key, hint=_how_to_set(source.key))
    locations = _listed(source.locations)
    if any(location.startswith(PIPE) for location in locations):
        raise RecipeError(
            "recipe.pipe-without-join",
            "{key} = {value!r}: only training data with data.order = 'join' can be a pipe",
            key=source.key,
            value=str(source),
        )
    with together(world):
        first = _opened(source, known, progress) if world.is_first else None
    named = broadcast(world, None if first is None else (first.path, first.fingerprint))
    assert named is not None
    path, fingerprint = named
    received = cache_folder() / path.name

    def same_index() -> Index | None:
        progress(0)  # this rank may have waited long for its turn
        saved = first or load_index(path) or load_index(received)
        return saved if saved and saved.fingerprint == fingerprint else None

    def own_index() -> Index:
        own = index or same_index() or _opened(source, known, progress)
        if own.fingerprint != fingerprint:
            raise DataError(
                "data.differs-between-nodes", location=str(source), host=socket.gethostname()
            )
        return own

    index = in_turns(world, same_index)
    if any(gather(world, index is None)) and all(map(is_remote, locations)):
        _send(path, received, source, world, keeps=index is None and world.local_rank == 0)
    return in_turns(world, own_index)


def _opened(source: Source, known: Sequence[str] | None, progress: Progress) -> Index:
    index = open_merged(_listed(source.locations or ()), known, progress, source.side)
    return corrected(index, source.corrections) if source.corrections else index


def _send(path: Path, received: Path, source: Source, world: World, *, keeps: bool) -> None:
    """Copy the first rank's index of a source to the ranks that keep it."""
    with together(world):
        content = path.read_bytes() if world.is_first else b""
    starts = range(0, broadcast(world, len(content)), _SENT_AT_ONCE)
    parts = (broadcast(world, content[start : start + _SENT_AT_ONCE]) for start in starts)
    kept = [part for part in parts if keeps]
    with together(world):
        if keeps:
            with into_cache(received, str(source)), atomic_write(received) as file:
                file.writelines(kept)


def _how_to_set(key: str) -> str:
    how = f"pass --data LOCATION, or --{key} LOCATION"
    if key != "data.val":
        return how
    return f"{how}, or --data.val_share 0.1 to validate on a tenth of the training data"


def slow_paths(*data: Index | Stream) -> list[str]:
    """Reasons why reading these data is slower than it could be."""
    remarks = [seek_remark(one) for one in data if isinstance(one, Index)]
    if not is_built():
        remarks = [f"decoding at a quarter of the speed, without the extension: {NEEDS_EXTENSION}"]
    return list(dict.fromkeys(text for text in remarks if text))


def what_is_left_out(data: Iterable[Index | Stream]) -> list[str]:
    """A line about the files, rows and members of each data set that are no samples."""
    lines = (
        printable(f"{one.root}: left out: {one.left_out}")
        for one in data
        if isinstance(one, Index) and one.left_out
    )
    return list(dict.fromkeys(lines))  # the splits of one file have one account


def what_is_lost(*data: Index | Stream) -> list[str]:
    """Remarks about what training does not see of the images, by a look at some of them."""
    looks = (lost.remarks(one) for one in data if isinstance(one, Index))
    return list(dict.fromkeys(printable(text) for some in looks for _, text in some))


def warn(console: Console, remarks: Iterable[str]) -> None:
    """Prints remarks, a line each."""
    for text in remarks:
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
