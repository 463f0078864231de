"""Reads samples one after another; remote ones are requested many at a time, as in training."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from trainyard.data.reading.reader import PlannedReads, Reader, Unreadable
from trainyard.data.sampler.plan import Ids
from trainyard.data.storage.encoded import EncodedSpans

_CHUNK = 64  # samples announced together
_AHEAD = 4  # chunks


def read_ahead(reader: Reader, ids: Ids) -> Iterator[bytes | OSError]:
    """The encoded image of each sample in order, or the error of one that cannot be read."""
    chunks = iter([ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK)])
    ahead: deque[PlannedReads] = deque()
    while True:
        ahead += map(reader.expect, islice(chunks, _AHEAD - len(ahead)))
        if not ahead:
            return
        planned = ahead.popleft()
        for piece in planned.pieces(slice(0, len(planned.ids))):
            stored = planned.stored(piece)
            yield from (_content(*stored, row) for row in range(piece.stop - piece.start))


def _content(images: EncodedSpans, unreadable: Unreadable, position: int) -> bytes | OSError:
    if position in unreadable:
        return OSError(unreadable[position])
    try:
        return images.content(position)
    except OSError as error:
        return error
