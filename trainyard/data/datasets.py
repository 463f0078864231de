"""From the [data] section of a recipe to indices and streams."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from trainyard.data.credentials import PIPE
from trainyard.data.index import Index, check_same_classes, load_index, match_classes
from trainyard.data.indexing import Progress
from trainyard.data.loader import DataConfig, Locations
from trainyard.data.merge import open_merged
from trainyard.data.overlap import check_apart
from trainyard.data.stream.shards import Stream, list_shards
from trainyard.errors import DataError, RecipeError
from trainyard.world import World, gather, in_turns, together


@dataclass(frozen=True)
class Datasets:
    train: Index | Stream
    val: Index

    @property
    def fingerprints(self) -> dict[str, str]:
        return {"train": self.train.fingerprint, "val": self.val.fingerprint}


def open_datasets(config: DataConfig, world: World, progress: Progress) -> Datasets:
    """The indices of the recipe's data, which have the same classes and no image in common.

    Training data that comes as a stream has no index, and the classes of the validation data.
    """
    if config.order == "join":
        shards = _same_shards(config, world)
        val = open_split(config.val, "data.val", world, progress)
        assert config.samples is not None
        found = Datasets(Stream(shards, config.samples, val.classes), val)
    else:
        train = open_split(config.train, "data.train", world, progress)
        found = Datasets(train, open_validation(config, train.classes, world, progress))
    with together(world):
        if world.is_first:
            check_apart(found.train, found.val)
    return found


def _same_shards(config: DataConfig, world: World) -> tuple[str, ...]:
    """The shards of a stream. Each rank lists them, to take each size-th: the lists must agree."""
    with together(world):
        shards = list_shards(config)
    digest = sha256("\n".join(shards).encode()).digest()
    first = gather(world, digest)[0]
    with together(world):
        if digest != first:
            raise DataError(
                f"{description(config.train)}: {socket.gethostname()} holds other "
                "shards there than the first rank's node"
            )
    return shards


def open_validation(
    config: DataConfig, classes: Sequence[str], world: World, progress: Progress
) -> Index:
    """The index of the validation data, of the same classes as the training data.

    Where that was merged, the parts with validation data may lack classes of the others.
    """
    known = None if isinstance(config.train, str | None) else classes
    val = open_split(config.val, "data.val", world, progress, known=known)
    with together(world):
        check_same_classes(classes, val.classes, description(config.val), has_names=val.has_names)
    return val


def open_labelled(
    locations: Locations, classes: Sequence[str], world: World, progress: Progress
) -> tuple[Index, list[int]]:
    """Other data to evaluate a model of `classes` on, and their number of each of its classes.

    The labels in the index are numbers of its own classes.
    """
    index = open_split(locations, "data.val", world, progress)
    with together(world):
        return index, match_classes(
            classes, index.classes, description(locations), has_names=index.has_names
        )


def description(locations: Locations | None) -> str:
    return " and ".join(_listed(locations or ()))


def _listed(locations: Locations) -> tuple[str, ...]:
    return (locations,) if isinstance(locations, str) else locations


def open_split(
    locations: Locations | None,
    key: str,
    world: World,
    progress: Progress,
    *,
    known: Sequence[str] | None = None,
) -> Index:
    """The index of a location on every rank; the first rank makes it, or checks the saved one.

    Several locations are merged; for `known` see `open_merged`.

    The others take the first one's word for it: a thousand ranks that look whether a thousand
    folders have changed are a load on a file server. Only where they cannot see its file, in a
    cache on another node, do they make their own.
    """
    if locations is None:
        raise RecipeError(f"{key} is not set: pass --data LOCATION, or --{key} LOCATION")
    if any(location.startswith(PIPE) for location in _listed(locations)):
        raise RecipeError(
            f"{key} = {description(locations)!r}: only training data with data.order = 'join' can "
            "come out of a pipe"
        )
    with together(world):
        first = open_merged(_listed(locations), known, progress) if world.is_first else None
    found = gather(world, None if first is None else (first.path, first.fingerprint))[0]
    assert found is not None
    path, fingerprint = found

    def same_index() -> Index:
        progress(0)  # it was another's turn for long, perhaps
        index = first or load_index(path)
        if index is None or index.fingerprint != fingerprint:
            index = open_merged(_listed(locations), known, progress)
        if index.fingerprint != fingerprint:
            raise DataError(
                f"{description(locations)}: {socket.gethostname()} holds other data there than "
                "the first rank's node (other files, sizes or classes)"
            )
        return index

    return in_turns(world, same_index)
