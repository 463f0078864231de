"""Parquet files as `datasets` writes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


HEAD = np.random.default_rng(9).bytes(400)  # the same in all images, like tables of a JPEG


def contents(sizes: list[int]) -> list[bytes]:
    random = np.random.default_rng(3)
    return [HEAD + random.bytes(size) for size in sizes]


IMAGES = contents([0, 10, 3000, 40_000, 65_536, 70_000, 150_000, 200, 300] * 4)


def write(
    path: Path,
    images: Sequence[bytes | None] = IMAGES,
    names: list[str] | None = None,
    *,
    kind: pa.DataType = IMAGE,
    labels: list[int | None] | None = None,
    **settings: Any,
) -> Path:
    """A file with the metadata that `datasets` writes."""
    pq.write_table(table_of(images, names, kind=kind, labels=labels), path, **settings)
    return path


def write_arrow(
    path: Path, table: pa.Table, *, is_stream: bool = True, codec: str | None = None
) -> Path:
    """A file of batches of ten rows: a stream, as save_to_disk of `datasets` writes it, or not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as file:
        file.write_table(table, max_chunksize=10)
    return path


def table_of(
    images: Sequence[bytes | None] = IMAGES,
    names: list[str] | None = None,
    *,
    kind: pa.DataType = IMAGE,
    labels: list[int | None] | None = None,
) -> pa.Table:
    """The table of images and labels."""
    label: dict[str, Any] = {"dtype": "int64", "_type": "Value"}
    if names:
        label = {"names": names, "_type": "ClassLabel"}
    about = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
    column = list(images) if kind != IMAGE else [{"bytes": i, "path": "x.jpg"} for i in images]
    columns = {
        "image": pa.array(column, kind),
        "label": pa.array(labels or [n % 3 for n in range(len(images))], pa.int64()),
    }
    return pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(about)})
