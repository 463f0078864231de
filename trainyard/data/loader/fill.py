"""Fills slices of batches with samples and their pixels, in threads of the loader process."""

from collections.abc import Callable, Sequence
from operator import itemgetter

from trainyard.data._native import own_decoder
from trainyard.data.batch import BadSample, HostArray, HostBatch, Samples, samples_of
from trainyard.data.decode.crops import CropParameters, Interpolation
from trainyard.data.decode.decode import decode_batch
from trainyard.data.decode.rendering import Rendering
from trainyard.data.decode.seek_tables import open_seek
from trainyard.data.index.table import Index
from trainyard.data.loader.encoded_batch import put_encoded
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.reading.reader import Reader
from trainyard.data.reading.staging import StagedShards
from trainyard.data.sampler.plan import Ids
from trainyard.data.storage.encoded import EncodedSpans
from trainyard.image_size import ImageSize


def fill_samples(
    encoded: EncodedSpans | Sequence[bytes],
    samples: Samples[HostArray],
    crops: CropParameters,
    out: HostBatch,
    *,
    how: Interpolation,
    rendering: Rendering,
    seek: EncodedSpans | None = None,
    gpu_size: ImageSize | None = None,
) -> dict[int, str]:
    """Fills `out`, a part of a slot, with samples and the crops of their images.

    Returns positions of images that could not be decoded, with the reasons; their weights are 0.
    With `gpu_size`, JPEGs stay encoded, for a GPU to decode into images of that size.
    """
    if gpu_size is not None:
        bad = put_encoded(
            encoded, crops, out.images_BHWC, size=gpu_size, how=how, rendering=rendering
        )
    else:
        bad = decode_batch(
            encoded,
            crops,
            out.images_BHWC,
            how,
            decoder=own_decoder(),
            seek=seek,
            rendering=rendering,
        )
    for column, values in zip(out.columns().values(), samples.columns().values(), strict=True):
        column[:] = values
    out.weights[list(bad)] = 0
    return bad


Fill = Callable[[int, HostBatch, slice], list[BadSample]]
"""Fills a slice of a slot for the batch that begins at a number among planned samples."""


class SliceFiller:
    """Fills slices of batches, in threads, after a call of `plan` for their samples."""

    def __init__(
        self, index: Index, config: LoaderSpec, staged: StagedShards | None = None
    ) -> None:
        self._index, self._config = index, config
        self._reader = Reader(index, staged)
        self._seek = open_seek(index) if config.decode == "cpu" else None

    def plan(self, ids: Ids, epochs: Ids) -> Fill:
        """Prepares samples: the work that costs little more for many samples than for few."""
        config = self._config
        columns = samples_of(len(ids), ids=ids, epochs=epochs, labels=self._index.label[ids])
        ticket, crops = self._reader.prefetch(ids), config.crop.draw(ids, epochs)
        seek = self._seek and self._seek.of(ids)

        def fill(first: int, slot: HostBatch, part: slice) -> list[BadSample]:
            bad: list[BadSample] = []
            for rows, encoded, unreadable in ticket.read(
                slice(first + part.start, first + part.stop)
            ):
                samples = columns.map(itemgetter(rows))
                reasons = fill_samples(
                    encoded,
                    samples,
                    crops[rows],
                    slot.part(slice(rows.start - first, rows.stop - first)),
                    how=config.interpolation,
                    rendering=config.rendering,
                    seek=seek and seek.part(rows),
                    gpu_size=config.image_size if config.decode == "gpu" else None,
                )
                for row, reason in reasons.items():  # the reason from reading comes first
                    sample = int(samples.ids[row])
                    path, offset, _ = self._index.locate(sample)
                    bad.append(BadSample(sample, path, offset, unreadable.get(row, reason)))
            return bad

        return fill

    def has_planned_enough(self) -> bool:
        """True if planning further ahead gains nothing."""
        return self._reader.is_far_enough_ahead()
