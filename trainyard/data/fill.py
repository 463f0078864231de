"""Fills slices of batches, in threads of the loader process: bytes, pixels, labels, weights."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.data.augment import Crops
from trainyard.data.decode import Interpolation, decode_batch, own_decoder
from trainyard.data.encoded import Target, put_encoded
from trainyard.data.index import Index
from trainyard.data.loader import LoaderSpec
from trainyard.data.plan import Ids
from trainyard.data.read import Reader
from trainyard.data.ring import Slot
from trainyard.data.seek import Stretches, open_seek
from trainyard.data.stage.copies import Copies
from trainyard.data.stored import Stored

Bad = list[tuple[int, str, int, str]]  # id, file, offset, reason
Crop = Callable[[Ids, Ids, Ids], Crops]  # of sizes, ids and visits

_PIECE = 16 << 20  # bytes of encoded images that a thread holds at once, or one image


class Columns(NamedTuple):
    """Samples on their way into a slot."""

    encoded: Stored | Sequence[bytes]
    labels: NDArray[np.integer[Any]]
    ids: Ids
    visits: Ids


def put(
    samples: Columns,
    slot: Slot,
    part: slice,
    *,
    crop: Crop,
    how: Interpolation,
    seek: Stretches | None = None,
    gpu_size: int | None = None,
) -> dict[int, str]:
    """Fill a slice of a slot; the positions in it that could not be decoded, with the reasons.

    With `gpu_size` JPEGs are left as they are, for a GPU to make images of that size of.
    """
    if gpu_size is not None:
        bad = put_encoded(samples, slot.images_BHWC[part], Target(crop, gpu_size, how))
    else:
        bad = decode_batch(
            samples.encoded,
            lambda sizes: crop(sizes, samples.ids, samples.visits),
            slot.images_BHWC[part],
            how,
            decoder=own_decoder(),
            seek=seek,
        )
    slot.ids[part] = samples.ids
    slot.visits[part] = samples.visits
    slot.labels[part] = samples.labels
    weights = slot.weights[part]
    weights[:] = 1
    weights[list(bad)] = 0
    return bad


class SliceFiller:
    """Fills one slice of a batch, in a thread: labels, weights, pixels."""

    def __init__(self, index: Index, config: LoaderSpec, copies: Copies | None = None) -> None:
        self._index, self._config = index, config
        self._reader, self._seek = Reader(index, copies), open_seek(index)

    def __call__(self, ids: Ids, epochs: Ids, slot: Slot, part: slice) -> Bad:
        pieces = self._pieces(ids, part)
        return [row for piece in pieces for row in self._fill(ids, epochs, slot, piece)]

    def _pieces(self, ids: Ids, part: slice) -> list[slice]:
        """Parts of it whose encoded images may be in memory together."""
        piece = np.cumsum(self._index.size[ids[part]]) // _PIECE
        borders = part.start + np.flatnonzero(np.diff(piece)) + 1
        return [slice(a, b) for a, b in pairwise([part.start, *borders.tolist(), part.stop])]

    def _fill(self, ids: Ids, epochs: Ids, slot: Slot, part: slice) -> Bad:
        ids, epochs = ids[part], epochs[part]
        encoded, unreadable = self._reader.stored(ids)
        columns = Columns(encoded, self._index.label[ids], ids, epochs)
        config = self._config
        bad = put(
            columns,
            slot,
            part,
            crop=config.crop,
            how=config.interpolation,
            seek=self._seek and self._seek.of(ids),
            gpu_size=config.image_size if config.decode == "gpu" else None,
        )
        # Some that could not be mapped were read all the same.
        reasons = {position: unreadable.get(position, reason) for position, reason in bad.items()}
        return [self._describe(int(ids[position]), reason) for position, reason in reasons.items()]

    def expect(self, ids: Ids) -> None:
        """These will be wanted soon."""
        self._reader.expect(ids)

    def _describe(self, sample: int, reason: str) -> tuple[int, str, int, str]:
        path, offset, _ = self._index.locate(sample)
        return sample, path, offset, reason
