"""A page on which one decides about images that may have a wrong label, and saves a list."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from trainyard.data.index.corrections import Correction
from trainyard.data.index.table import digest_of
from trainyard.files import write_text
from trainyard.report.markup import as_json
from trainyard.report.pictures import Album

SIDE = 320  # pixels; most of the longer side of a picture


class Reviewed(NamedTuple):
    """An image to decide on."""

    file: str
    key: int
    """Its number in the file; see `Index.keys_in_file`."""
    label: str
    guess: str
    confidence: float
    classes: tuple[str, ...]
    album: Album
    sample: int


def write_review(
    path: Path, images: Sequence[Reviewed], earlier: Iterable[Correction] = ()
) -> None:
    """Write the page, whose list begins with the `earlier` decisions. OSError if that fails."""
    for album in {id(one.album): one.album for one in images}.values():
        album.load(one.sample for one in images if one.album is album)
    rows = [
        {
            "file": one.file,
            "key": str(one.key),  # more bits than a number has in a browser
            "label": one.label,
            "guess": one.guess,
            "sure": f"{one.confidence:.0%}",
            "picture": one.album.uri(one.sample),
        }
        for one in images
    ]
    classes = sorted({name for one in images for name in one.classes})
    known_as = digest_of([(one.file, one.key, one.label) for one in images])
    before = [(one.file, "" if one.key is None else str(one.key), one.name, "") for one in earlier]
    data = as_json({"images": rows, "classes": classes, "id": known_as, "earlier": before})
    page = Path(__file__).with_name("review.html").read_text("utf-8")
    write_text(path, page.replace("{{ data }}", data), errors="surrogateescape")
