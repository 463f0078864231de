"""The columns of a Parquet file of images, and the names of its classes in its metadata.

`datasets` writes its features as JSON into the schema's metadata, under the key "huggingface".
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.data.formats.columns import Unread, find_column, find_split, may_be_split, missing
from trainyard.errors import DataError

_KEY = b"huggingface"


@dataclass(frozen=True)
class Layout:
    image: str
    """The column of the images: their bytes, or a struct that holds these."""
    label: str
    has_lists: bool
    """True if a label is a list of class numbers or names."""
    is_text: bool
    """True if labels are names of classes, not numbers."""
    classes: list[str] | None
    """Names by label; None if the metadata has none."""
    split: str | None
    """A column of texts that may contradict a file of one split."""
    unread: Unread
    """The other columns."""
    watched: list[str]
    """Those that may be splits by another name."""


def find_layout(file: Any, name: str, options: Mapping[str, str]) -> Layout:
    """The columns of pyarrow's `file`; `options`: those of its location.

    DataError if none or several can be meant, or the label is neither whole numbers nor texts.
    """
    features = _features(file, name)
    schema = file.schema_arrow
    kinds = {column: _of_list(features.get(column)) for column in schema.names}
    classes = [column for column, kind in kinds.items() if _is_feature(kind, "ClassLabel")]
    at = find_column("label", schema.names, name, wanted=options.get("label"), also=classes)
    if at is None:
        raise missing("label", schema.names, name)
    label = str(schema.names[at])
    has_lists, is_text = _label_kind(schema.field(at).type, name, label)
    image = _find_image(schema, features, name, label)
    wanted = options.get("split")
    split = find_split(schema.names, name, wanted=wanted)
    if split is not None and not wanted and not _is_text(schema.field(split).type):
        split = None
    unread = Unread(schema.names, (at, schema.names.index(image), split))
    watched = [schema.names[at] for at in unread.values if _is_watched(schema.field(at))]
    return Layout(
        image=image,
        label=label,
        has_lists=has_lists,
        is_text=is_text,
        classes=None if is_text else _names(_of_list(features.get(label)), name),
        split=None if split is None else str(schema.names[split]),
        unread=unread,
        watched=watched if split is None and not wanted else [],
    )


def _is_watched(field: Any) -> bool:
    from pyarrow import types

    kind = field.type
    is_simple = _is_text(kind) or types.is_boolean(kind) or types.is_integer(kind)
    return is_simple and may_be_split(field.name)


def metadata_of(classes: Sequence[str] | None, has_lists: bool = False) -> dict[bytes, bytes]:
    """The metadata by which `datasets` knows the columns image and label."""
    label: dict[str, Any] = {"dtype": "int64", "_type": "Value"}
    if classes is not None:
        label = {"names": list(classes), "_type": "ClassLabel"}
    if has_lists:  # the form that all versions of `datasets` read
        label = {"feature": label, "_type": "Sequence"}
    features = {"image": {"_type": "Image"}, "label": label}
    return {_KEY: json.dumps({"info": {"features": features}}).encode()}


def _is_image(kind: Any) -> bool:
    from pyarrow import types

    at = kind.get_field_index("bytes") if types.is_struct(kind) else -1
    value = kind.field(at).type if at >= 0 else kind
    return bool(types.is_binary(value) or types.is_large_binary(value))


def _find_image(schema: Any, features: dict[str, Any], name: str, label: str) -> str:
    """The column of images: by name, by feature, or as the only one of bytes."""
    from pyarrow.types import is_struct

    images = [field.name for field in schema if _is_image(field.type) and field.name != label]
    known = [one for one in schema.names if _is_feature(features.get(one), "Image")]
    at = find_column("image", schema.names, name, also=known)
    named = images if at is None else [one for one in images if one == schema.names[at]]
    if len(named) == 1:
        return str(named[0])
    if at is None:
        raise missing("image", schema.names, name)
    kind = schema.field(at).type
    if _is_text(kind) or (is_struct(kind) and kind.get_field_index("path") >= 0):
        raise DataError(
            "parquet.column-of-paths",
            "{path}: its column {column!r} holds paths, not images: embed the images in the file, "
            "as `push_to_hub` of datasets does, or name their folder, or a list (.csv) of the "
            "paths, as the data",
            path=name,
            column=schema.names[at],
        )
    raise DataError(
        "parquet.column-not-images",
        "{path}: its column {column!r} is {type}, and no images: expected binary, or "
        "struct<bytes: binary, path: string>, with the contents of image files",
        path=name,
        column=schema.names[at],
        type=str(kind),
    )


def _label_kind(kind: Any, path: str, column: str) -> tuple[bool, bool]:
    """Whether labels are lists, and whether they are texts; DataError unless they are numbers."""
    from pyarrow import types

    has_lists = types.is_list(kind) or types.is_large_list(kind)
    value = kind.value_type if has_lists else kind
    number = value.value_type if types.is_dictionary(value) else value
    if not _is_text(value) and not types.is_integer(number):
        raise DataError(
            "parquet.unknown-label-type",
            "{path}: its column {column!r} is {type}: labels are whole numbers or texts, or lists "
            "of them; or name another column of labels: LOCATION#label=COLUMN",
            path=path,
            column=column,
            type=str(kind),
        )
    return has_lists, _is_text(value)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return str(kind) in ("string", "large_string", "string_view")


def _is_feature(feature: Any, kind: str) -> bool:
    return isinstance(feature, dict) and feature.get("_type") == kind


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
        raise DataError(
            "parquet.class-names-no-list",
            "{path}: the names of its classes are no list of names",
            path=name,
        )
    if len({*names}) < len(names):
        raise DataError("data.class-name-twice", path=name)
    return names
