"""Arrow files of images, as `save_to_disk` of `datasets` writes them: batches of rows, one by one.

pyarrow maps a file into memory, so where a column lies there is where it lies in the file.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainyard.data.formats.parquet_pages import NullValue
from trainyard.data.storage.snappy import SnappySpan
from trainyard.installation import needed

SUFFIX = ".arrow"
MAGIC = (b"\xff\xff\xff\xff", b"ARROW1")
"""How a stream of batches begins, and a file of them with a table of contents."""


class ArrowFile:
    """A file on a local disk, in the terms of pyarrow's Parquet files: a batch is a row group."""

    def __init__(self, path: str) -> None:
        pa = needed("pyarrow", "parquet", "Arrow")
        self._pa, self._whole = pa, pa.memory_map(path).read_buffer()
        if self._whole[: len(MAGIC[1])].to_pybytes() == MAGIC[1]:
            file = pa.ipc.open_file(self._whole)
            self._batches = [file.get_batch(n) for n in range(file.num_record_batches)]
        else:
            file = pa.ipc.open_stream(self._whole)
            self._batches = [*file]
        self.schema_arrow = file.schema
        self.num_row_groups = len(self._batches)

    @property
    def metadata(self) -> "ArrowFile":
        return self

    def read_row_group(self, number: int, columns: Sequence[str], use_threads: bool = True) -> Any:
        """The columns of a batch as a table."""
        return self._pa.Table.from_batches([self._batches[number]]).select(columns)

    def spans(self, number: int, name: str) -> list[SnappySpan]:
        """Where the values of a column of a batch lie in the file.

        NullValue for a row without one, ValueError for a batch that is compressed.
        """
        column = self._batches[number].column(name)
        parts = [column]
        if self._pa.types.is_struct(column.type):
            parts.append(column.field("bytes"))
        is_null = np.logical_or.reduce([np.asarray(part.is_null()) for part in parts])
        if is_null.any():
            raise NullValue(int(is_null.argmax()))
        _, ends, content = parts[-1].buffers()
        kind = "<i8" if self._pa.types.is_large_binary(parts[-1].type) else "<i4"
        first = parts[-1].offset
        places = np.frombuffer(ends, kind)[first : first + len(column) + 1].astype(np.int64)
        places += content.address - self._whole.address
        if not 0 <= places[0] <= places[-1] <= self._whole.size:
            raise ValueError("its images are compressed: write it by save_to_disk, as it is")
        pairs = zip(places[:-1].tolist(), np.diff(places).tolist(), strict=True)
        return [SnappySpan(start, size, 0, 0) for start, size in pairs]
