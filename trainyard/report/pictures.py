"""Thumbnails of validation samples, embedded in the page."""

import base64
import io
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from trainyard.data.decode.decode import BadImageError, whole_image
from trainyard.data.decode.rendering import PLAIN, Rendering
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.credentials import without_secrets
from trainyard.errors import InputError
from trainyard.report.runs import Run

_SIDE = 144  # pixels; most of the longer side
_SMALL = 48  # pixels; images this small are stored losslessly, as their pixels are visible
_QUALITY = 60  # of WebP: half the bytes of a JPEG that looks the same
_READ_THREADS = 8  # to hide the latency of a network file system


@dataclass
class Album:
    """Thumbnails of one run's validation data, if the data is available."""

    index: Index | None = None
    why_none: str = ""
    rendering: Rendering = PLAIN
    """As in the run."""
    overlay: Callable[[bytes, int | None], Image.Image] | None = None
    """Draws where the model finds a class, if that is wanted; see Classifier.overlay."""
    side: int = _SIDE
    """Most of the longer side, in pixels."""
    _uris: dict[int, str | None] = field(default_factory=dict)

    def load(self, samples: Iterable[int]) -> None:
        """Read thumbnails that are not loaded yet."""
        wanted = sorted(set(samples) - self._uris.keys())
        if self.index is None or not wanted:
            return
        reader = Reader(self.index)
        Image.init()  # not in threads: one would miss formats that another is registering
        with warnings.catch_warnings(), ThreadPoolExecutor(_READ_THREADS) as pool:
            warnings.filterwarnings("ignore", module="PIL")
            uris = list(pool.map(lambda sample: self._read(reader, sample), wanted))
        self._uris.update(zip(wanted, (uri for uri, _ in uris), strict=True))
        if not any(self._uris.values()):
            self.why_none = f"The validation images cannot be read here ({uris[0][1]})."

    def uri(self, sample: int) -> str | None:
        """A loaded thumbnail as a data URI; None for an unreadable image."""
        return self._uris.get(sample)

    def map_uri(self, sample: int, label: int | None) -> str | None:
        """Where a class is found in a loaded image, as a data URI; None if that is not wanted."""
        if self.overlay is None or self.index is None or self.uri(sample) is None:
            return None
        return _as_uri(self.overlay(bytes(Reader(self.index).read(sample)), label), self.side)

    def _read(self, reader: Reader, sample: int) -> tuple[str | None, str]:
        """The thumbnail, or None and the reason."""
        image = _image(reader, sample, self.rendering)
        return (None, image) if isinstance(image, str) else (_as_uri(image, self.side), "")

    def image(self, sample: int) -> Image.Image | str:
        """A whole image, or the reason why there is none; of data that is at hand."""
        assert self.index is not None
        return _image(Reader(self.index), sample, self.rendering)

    def path(self, sample: int) -> str:
        """The path or URL of a sample's file; "" if the data is not available."""
        if self.index is None:
            return ""
        path = without_secrets(self.index.locate(sample)[0])
        return path if "://" in path else str(Path(path).absolute())


def open_data(run: Run, name: str | None = None) -> Index:
    """The validation data of a run, or the data with this name in the files of `evaluate`."""
    from trainyard.config import load_recipe
    from trainyard.data.index.merge import open_merged
    from trainyard.data.open_datasets import open_split, source_of
    from trainyard.world import World

    source = source_of(load_recipe(str(run.folder.recipe)).data, "val")
    if name is None or name == str(source):
        return open_split(source, World(), lambda *_: None, known=run.classes or None)
    try:
        return open_merged([name], None)
    except InputError:
        if " and " not in name:  # between the locations of merged data
            raise
    return open_merged(name.split(" and "), None)


def open_album(run: Run) -> Album:
    """The album of a run: empty, and with a reason, if its data is not there or has changed."""
    try:
        index = open_data(run)
    except (InputError, OSError) as error:
        return Album(
            why_none=f"The validation images are not at hand here ({without_secrets(str(error))})."
        )
    if has_changed(run, "val", index):
        return Album(
            why_none="The validation data is no longer what the run was validated on, so its "
            "images are not shown."
        )
    return Album(index, rendering=rendering_of(run))


def has_changed(run: Run, split: str, index: Index) -> bool:
    """True if the data of a split is known to be no longer that of the run."""
    fingerprints = run.environment.get("fingerprints")
    fingerprint = fingerprints.get(split) if isinstance(fingerprints, dict) else None
    return fingerprint not in (None, index.fingerprint)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def rendering_of(run: Run) -> Rendering:
    """How a run reads the pixels of images."""
    values: dict[str, Any] = {
        key: _as_tuple(value)
        for key in Rendering._fields
        if (value := run.recipe.get(f"data.{key}")) is not None
    }
    return Rendering(**values)


def _image(reader: Reader, sample: int, rendering: Rendering) -> Image.Image | str:
    """The image, or the reason why there is none."""
    try:
        return whole_image(reader.read(sample), rendering)
    except (InputError, OSError, BadImageError) as error:
        return without_secrets(str(error))


def _as_uri(image: Image.Image, side: int = _SIDE) -> str:
    buffer = io.BytesIO()
    if max(image.size) <= _SMALL:
        image.save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        image.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=3)
        image.save(buffer, "WEBP", quality=_QUALITY, method=6)
        kind = "webp"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
