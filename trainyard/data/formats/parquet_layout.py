"""The columns of a Parquet file of images, and the names of its classes in its metadata.

`datasets` writes its features as JSON into the schema's metadata, under the key "huggingface".
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.errors import DataError

_KEY = b"huggingface"
# The usual names of the label, where a file has several columns of integers.
_LABELS = ("label", "labels", "fine_label", "class")
_IMAGES = ("image", "img")


@dataclass(frozen=True)
class Layout:
    image: int
    """The number of the column that holds the bytes."""
    label: str
    has_lists: bool
    """True if a label is a list of class numbers."""
    classes: list[str] | None
    """Names by label; None if the file has none."""


def find_layout(file: Any, name: str) -> Layout:
    """The columns of pyarrow's `file`. DataError if none or several can be the image."""
    features = _features(file, name)
    paths = [file.schema.column(n).path for n in range(len(file.schema))]
    images = [n for n in range(len(paths)) if _is_image(file.schema.column(n))]
    named = [n for n in images if paths[n].split(".")[0] in _IMAGES]
    image = named if len(images) > 1 else images
    labels = [n for n in file.schema_arrow.names if _is_label(file, n, features)]
    labels = [n for n in labels if not _has_lists(file, n)] or labels
    label = [n for n in _LABELS if n in labels] or labels
    if len(image) != 1 or not label or (len(label) > 1 and label[0] not in _LABELS):
        raise DataError(
            f"{name}: expected a column of images (struct<bytes, path> or binary) and one of "
            f"integers, or lists of them, called label; found {', '.join(file.schema_arrow.names)}"
        )
    classes = _names(_of_list(features.get(label[0])), name)
    return Layout(image[0], label[0], _has_lists(file, label[0]), classes)


def metadata_of(classes: Sequence[str] | None, has_lists: bool = False) -> dict[bytes, bytes]:
    """The metadata by which `datasets` knows the columns image and label."""
    label: dict[str, Any] = {"dtype": "int64", "_type": "Value"}
    if classes is not None:
        label = {"names": list(classes), "_type": "ClassLabel"}
    if has_lists:  # the form that all versions of `datasets` read
        label = {"feature": label, "_type": "Sequence"}
    features = {"image": {"_type": "Image"}, "label": label}
    return {_KEY: json.dumps({"info": {"features": features}}).encode()}


def _is_image(column: Any) -> bool:
    is_bytes = column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "STRING"
    parts = column.path.split(".")
    is_flat = column.max_repetition_level == 0 and len(parts) <= 2
    return is_bytes and is_flat and (len(parts) == 1 or parts[1] == "bytes")


def _is_label(file: Any, name: str, features: dict[str, Any]) -> bool:
    import pyarrow

    kind = file.schema_arrow.field(name).type
    kind = kind.value_type if _has_lists(file, name) else kind
    is_class = _is_class(features.get(name)) or not any(map(_is_class, features.values()))
    return bool(pyarrow.types.is_integer(kind)) and is_class


def _has_lists(file: Any, name: str) -> bool:
    import pyarrow

    kind = file.schema_arrow.field(name).type
    return bool(pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind))


def _is_class(feature: Any) -> bool:
    feature = _of_list(feature)
    return isinstance(feature, dict) and feature.get("_type") == "ClassLabel"


def _of_list(feature: Any) -> Any:
    """The feature of a list's values, in the forms of `datasets` 1 to 4; others as they are."""
    if isinstance(feature, list) and feature:
        return feature[0]
    if isinstance(feature, dict) and feature.get("_type") in ("Sequence", "List", "LargeList"):
        return feature.get("feature")
    return feature


def _features(file: Any, name: str) -> dict[str, Any]:
    text = (file.schema_arrow.metadata or {}).get(_KEY)
    try:
        features = json.loads(text)["info"]["features"] if text else {}
    except (ValueError, LookupError, TypeError, RecursionError):
        features = {}
    return features if isinstance(features, dict) else {}


def _names(feature: Any, name: str) -> list[str] | None:
    names = feature.get("names") if isinstance(feature, dict) else None
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise DataError(f"{name}: the names of its classes are no list of names")
    if len({*names}) < len(names):
        raise DataError(f"{name}: a name of a class appears twice in its metadata")
    return names
