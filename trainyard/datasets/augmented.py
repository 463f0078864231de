"""A contact sheet of augmented images, by the loader and the feed of training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainyard.course import build_course
from trainyard.data.index.table import Index
from trainyard.data.reading.reader import Reader, read_ahead
from trainyard.data.sampler.plan import EndlessPlan
from trainyard.datasets.contact_sheet import CHAT_PIXELS, Ids, Tile, sheet_of, stored_tile
from trainyard.image_size import ImageSize

if TYPE_CHECKING:  # the loader process reads the plan below, and has no torch
    from trainyard.data.batch import Batch
    from trainyard.data.feeds import Feeds

_BATCH = 256  # images that are read for a picture of a batch


@dataclass(frozen=True)
class Visits(EndlessPlan):
    """The same samples again and again; a batch is a visit to each of them."""

    samples: Ids

    @property
    def global_batch(self) -> int:  # type: ignore[override]
        return len(self.samples)

    @property
    def epoch_samples(self) -> int:
        return len(self.samples)

    def _ids(self, positions: Ids) -> Ids:
        return self.samples[positions % len(self.samples)]

    def _visits(self, positions: Ids) -> Ids:
        return positions // len(self.samples)


def augmented_sheet(
    index: Index, samples: Ids, feeds: "Feeds", *, visits: int, title: Sequence[str]
) -> Image.Image:
    """A row for each sample: as stored, then as training sees it in its first epochs.

    Crops and whatever else one sample decides are those of a run with the seed of `feeds`. Partners
    of mixing are the other samples.
    """
    course = build_course(
        f"{visits} epochs",
        epoch_samples=len(samples),
        batch=len(samples),
        image_size=feeds.data.image_size,
    )
    of_sheet = replace(feeds, global_batch=len(samples))
    columns: list[list[Tile]] = []
    with of_sheet.train(index, Visits(samples), course) as feed:
        feed.seek(0, 0)
        for number, batch in enumerate(feed):
            columns.append([*_tiles(batch, index, feeds, f"epoch {number + 1}")])
    contents = read_ahead(Reader(index), samples)
    tiles: list[Tile] = []
    for row, (sample, content) in enumerate(zip(samples.tolist(), contents, strict=True)):
        tiles += [stored_tile(index, sample, content), *(column[row] for column in columns)]
    return sheet_of(tiles, visits + 1, title, count=len(tiles))


def first_batch(
    index: Index,
    plan: EndlessPlan,
    feeds: "Feeds",
    *,
    size: ImageSize,
    count: int,
    title: Sequence[str],
) -> Image.Image:
    """The first images of a plan as the first step of training sees them, four in a row.

    Of a batch above _BATCH images, partners of mixing are among the first ones.
    """
    epoch, batch_size = plan.epoch_samples, min(feeds.global_batch, _BATCH)
    course = build_course("1 steps", epoch_samples=epoch, batch=batch_size, image_size=size)
    with feeds.train(index, plan, course) as feed:
        feed.seek(0, 0)
        tiles = [*islice(_tiles(next(iter(feed)), index, feeds), count)]
    return sheet_of(tiles, 4, title, count=len(tiles), pixels=CHAT_PIXELS)


def _tiles(batch: "Batch", index: Index, feeds: "Feeds", detail: str = "") -> Iterator[Tile]:
    """The tiles of a batch, in its order, with their ids or another detail."""
    shape = (1, -1, 1, 1)
    mean, std = (
        batch.images_BCHW.new_tensor(values).view(shape)
        for values in (feeds.data.mean, feeds.data.std)
    )
    images_BHWC = (batch.images_BCHW * std + mean).clamp(0, 1).mul(255).round()
    pixels_BHWC = images_BHWC.byte().permute(0, 2, 3, 1).cpu().numpy()
    wrong = {bad.id: bad.reason for bad in batch.bad}
    lams, others = batch.lam.tolist(), batch.mixed_labels.tolist()
    for row, sample in enumerate(batch.ids.tolist()):
        name, lam = ", ".join(index.class_names(sample)), lams[row]
        if lam < 1 and index.lists is None:
            name = f"{lam:.0%} {name}, {1 - lam:.0%} {index.classes[others[row]]}"
        picture = wrong.get(sample) or _image(pixels_BHWC[row])
        yield Tile(picture, name, detail or f"#{sample}")


def _image(pixels_HWC: NDArray[np.uint8]) -> Image.Image:
    channels = 3 if pixels_HWC.shape[2] >= 3 else 1
    return Image.fromarray(np.squeeze(pixels_HWC[:, :, :channels], -1 if channels == 1 else ()))
