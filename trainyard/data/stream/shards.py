"""Training data without an index: shards that are read once as streams, front to back."""

from dataclasses import dataclass

from trainyard.data.config import DataConfig
from trainyard.data.formats.class_tar import check_all_read
from trainyard.data.storage.credentials import PIPE
from trainyard.data.storage.location import expand_braces, find_place
from trainyard.data.storage.source import is_remote
from trainyard.errors import DataError, RecipeError


@dataclass(frozen=True)
class Stream:
    """Shards to read in turn. `len` is the number of samples that the recipe states."""

    shards: tuple[str, ...]
    samples: int
    classes: tuple[str, ...]
    numbers: tuple[int, ...]
    """The label of each class in the shards."""

    def __len__(self) -> int:
        return self.samples

    @property
    def epoch_samples(self) -> int:
        return self.samples

    @property
    def fingerprint(self) -> str:
        """A description of the data as far as known without reading it."""
        return f"a stream of {len(self.shards)} shards"


def list_shards(config: DataConfig) -> tuple[str, ...]:
    """The shards of `data.train`. RecipeError or DataError if they cannot be a stream."""
    _check(config)
    assert isinstance(config.train, str)
    return tuple(_list(config.train))


def _check(config: DataConfig) -> None:
    if config.train is None:
        raise RecipeError("recipe.data-not-set", key="data.train", hint="pass --data.train SHARDS")
    if not isinstance(config.train, str):
        raise RecipeError(
            "stream.several-locations",
            "data.train has several locations; with data.order = 'join' it has one: a brace list",
        )
    if config.samples is None:
        raise RecipeError(
            "stream.samples-not-set",
            "data.samples is not set: with data.order = 'join' the number of samples per pass is "
            "not known; set it, a good estimate suffices for schedules",
        )
    usual = DataConfig()
    for key in ("locality", "weights", "repeats", "stage", "stage_gb"):
        value = getattr(config, key)
        if value != getattr(usual, key):
            raise RecipeError(
                "stream.needs-index",
                "{key} = {value} is for data that has an index; a stream, with data.order = "
                "'join', takes none of it: leave it out",
                key=f"data.{key}",
                value=value,
            )


def _list(location: str) -> list[str]:
    if location.startswith(PIPE):
        return expand_braces(location)
    place = find_place(location)
    scheme = location.partition("://")[0].lower()
    if is_remote(location) and scheme not in ("http", "https", "hf"):
        raise DataError(
            "stream.object-store",
            "{location}: {scheme}:// is read by an index: leave out data.order = 'join', or name "
            "a command that writes its shards, as in 'pipe:COMMAND'",
            location=location,
            scheme=scheme,
        )
    names = place.names
    if place.is_folder:
        check_all_read(place)
        names = place.files(".tar")
    if not names:
        raise DataError(
            "stream.no-shards", "{location}: no shards (*.tar) in it", location=location
        )
    return [place.path(name) for name in names]
