"""Small pictures of validation samples, for the page to hold them itself."""

import base64
import io
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from trainyard.data.credentials import without_secrets
from trainyard.data.decode import BadImageError, whole_image
from trainyard.data.index import Index
from trainyard.data.read import Reader
from trainyard.errors import InputError
from trainyard.report.runs import Run

_SIDE = 160  # pixels of the longer side, at most
_SMALL = 48  # pixels; what is as small is stored as it is, its pixels are seen
_QUALITY = 80
_READ_THREADS = 8  # hide the latency of a network file system


@dataclass
class Album:
    """The pictures of one run's validation data, as far as it is at hand."""

    index: Index | None = None
    why_none: str = ""
    _uris: dict[int, str | None] = field(default_factory=dict)

    def load(self, samples: Iterable[int]) -> None:
        """Read those that are not here yet."""
        wanted = sorted(set(samples) - self._uris.keys())
        if self.index is None or not wanted:
            return
        reader = Reader(self.index)
        Image.init()  # here, not in threads: one would pass over formats another is registering
        with warnings.catch_warnings(), ThreadPoolExecutor(_READ_THREADS) as pool:
            warnings.filterwarnings("ignore", module="PIL")
            found = list(pool.map(lambda sample: _uri(reader, sample), wanted))
        self._uris.update(zip(wanted, (uri for uri, _ in found), strict=True))
        if not any(self._uris.values()):
            self.why_none = f"The validation images cannot be read here ({found[0][1]})."

    def uri(self, sample: int) -> str | None:
        """What `load` has read; None for what cannot be read."""
        return self._uris.get(sample)

    def file(self, sample: int) -> str:
        """The file's name, "" if the data is not at hand."""
        return "" if self.index is None else Path(self.index.locate(sample)[0]).name


class Gallery:
    """The albums of runs, kept for as long as their pages are made again and again."""

    def __init__(self) -> None:
        self._albums: dict[Path, Album] = {}

    def album(self, run: Run) -> Album:
        path = run.folder.path.resolve()
        known = self._albums.get(path)
        if known is None or known.index is None:
            self._albums[path] = known = _open(run)
        return known


def _open(run: Run) -> Album:
    from trainyard.config import load_recipe
    from trainyard.data.datasets import open_split
    from trainyard.world import World

    try:
        config = load_recipe(str(run.folder.recipe))
        known = None if isinstance(config.data.train, str | None) else run.classes
        index = open_split(config.data.val, "data.val", World(), lambda _: None, known=known)
    except (InputError, OSError) as error:
        return Album(
            why_none=f"The validation images are not at hand here ({without_secrets(str(error))})."
        )
    fingerprint = run.environment.get("fingerprints", {}).get("val")
    if fingerprint not in (None, index.fingerprint):
        return Album(
            why_none="The validation data is no longer what the run was validated on, so its "
            "images are not shown."
        )
    return Album(index)


def _uri(reader: Reader, sample: int) -> tuple[str | None, str]:
    """The picture, or None and why there is none."""
    try:
        image = whole_image(reader.read(sample))
    except (InputError, OSError, BadImageError) as error:
        return None, without_secrets(str(error))
    buffer = io.BytesIO()
    if max(image.size) <= _SMALL:
        image.save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS, reducing_gap=3)
        image.save(buffer, "JPEG", quality=_QUALITY, optimize=True)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}", ""
