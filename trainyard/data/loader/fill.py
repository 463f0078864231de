"""Fills slices of batches with pixels, labels and weights, in threads of the loader process."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data._native import own_decoder
from trainyard.data.decode.crops import CropParameters
from trainyard.data.decode.decode import decode_batch
from trainyard.data.decode.interpolation import Interpolation
from trainyard.data.decode.seek_tables import SeekSlices, open_seek
from trainyard.data.index.table import Index
from trainyard.data.loader.encoded_batch import put_encoded
from trainyard.data.loader.ring import Slot
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.reading.reader import PlannedReads, Reader
from trainyard.data.reading.staged_copies import Copies
from trainyard.data.sampler.plan import Ids
from trainyard.data.storage.encoded import EncodedSpans

Bad = list[tuple[int, str, int, str]]  # id, file, offset, reason


class SliceContents(NamedTuple):
    """The samples to put into a slice of a slot."""

    encoded: EncodedSpans | Sequence[bytes]
    labels: NDArray[np.integer[Any]]
    ids: Ids
    visits: Ids
    crops: CropParameters


def put(
    samples: SliceContents,
    slot: Slot,
    part: slice,
    *,
    how: Interpolation,
    seek: SeekSlices | None = None,
    gpu_size: int | None = None,
) -> dict[int, str]:
    """Fills a slice of a slot. Returns positions that could not be decoded, with the reasons.

    With `gpu_size`, JPEGs stay encoded, for a GPU to decode into images of that size.
    """
    images_BHWC = slot.images_BHWC[part]
    if gpu_size is not None:
        bad = put_encoded(samples.encoded, samples.crops, images_BHWC, size=gpu_size, how=how)
    else:
        decoder = own_decoder()
        bad = decode_batch(
            samples.encoded, samples.crops, images_BHWC, how, decoder=decoder, seek=seek
        )
    slot.ids[part] = samples.ids
    slot.visits[part] = samples.visits
    slot.labels[part] = samples.labels
    weights = slot.weights[part]
    weights[:] = 1
    for position in bad:
        weights[position] = 0
    return bad


class PlannedBatches(NamedTuple):
    """Samples of some batches, with all data but their images."""

    images: PlannedReads
    labels: NDArray[np.integer[Any]]
    ids: Ids
    visits: Ids
    crops: CropParameters
    seek: SeekSlices | None


class SliceFiller:
    """Fills slices of batches, in threads, after a call of `plan` for their samples."""

    def __init__(self, index: Index, config: LoaderSpec, copies: Copies | None = None) -> None:
        self._index, self._config = index, config
        self._reader = Reader(index, copies)
        self._seek = open_seek(index) if config.decode == "cpu" else None

    def plan(self, ids: Ids, visits: Ids) -> PlannedBatches:
        """Prepares samples: the work that costs little more for many samples than for few."""
        return PlannedBatches(
            images=self._reader.expect(ids),
            labels=self._index.label[ids],
            ids=ids,
            visits=visits,
            crops=self._config.crop.draw(ids, visits),
            seek=self._seek and self._seek.of(ids),
        )

    def has_planned_enough(self) -> bool:
        """True if planning further ahead gains nothing."""
        return self._reader.expects_enough()

    def __call__(self, planned: PlannedBatches, first: int, slot: Slot, part: slice) -> Bad:
        """Fills a slice of a slot for the batch that begins at `first` of the planned samples."""
        rows = slice(first + part.start, first + part.stop)
        bad: Bad = []
        for piece in planned.images.pieces(rows):
            bad += self._fill(planned, piece, slot, slice(piece.start - first, piece.stop - first))
        return bad

    def _fill(self, planned: PlannedBatches, rows: slice, slot: Slot, part: slice) -> Bad:
        encoded, unreadable = planned.images.stored(rows)
        ids, config = planned.ids[rows], self._config
        bad = put(
            SliceContents(
                encoded, planned.labels[rows], ids, planned.visits[rows], planned.crops[rows]
            ),
            slot,
            part,
            how=config.interpolation,
            seek=planned.seek and planned.seek.part(rows),
            gpu_size=config.image_size if config.decode == "gpu" else None,
        )
        # The reason from reading comes first.
        reasons = {position: unreadable.get(position, reason) for position, reason in bad.items()}
        return [self._describe(int(ids[position]), reason) for position, reason in reasons.items()]

    def _describe(self, sample: int, reason: str) -> tuple[int, str, int, str]:
        path, offset, _ = self._index.locate(sample)
        return sample, path, offset, reason
