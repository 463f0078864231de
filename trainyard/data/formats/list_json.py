"""A list of images in JSON: an object a line, a list of objects, or COCO's three tables.

Names in objects inside of objects are joined by dots: `class-metadata.class-name` of SageMaker.
"""

import json
from collections.abc import Iterator
from typing import Any

from trainyard.data.formats.list_text import Row, Table, text_lines
from trainyard.errors import DataError

LINES = (".jsonl", ".manifest")
SUFFIXES = (*LINES, ".json")
END = "\0"
"""What follows each value of a list in a cell."""
_TABLES = ("images", "annotations", "categories")


class JsonTable(Table):
    """The objects of a file as rows of cells. DataError for another content."""

    def __init__(self, path: str) -> None:
        self.path, self.has_header = path, True
        self._all = None if path.lower().endswith(LINES) else self._read()
        names, self.lists = dict[str, None](), set()
        for _, cells in self._objects():
            names |= dict.fromkeys(cells)
            self.lists.update(name for name, cell in cells.items() if END in cell)
        self.names = [*names]

    @property
    def header(self) -> str:
        return ""

    def rows(self) -> Iterator[Row]:
        for line, cells in self._objects():
            yield line, [cells.get(name, "") for name in self.names]

    def _objects(self) -> Iterator[tuple[int, dict[str, str]]]:
        if self._all is not None:
            yield from enumerate(self._all, start=1)
            return
        for line, text in enumerate(text_lines(self.path), start=1):
            if text.strip():
                tree = self._parsed(text, line)
                if not isinstance(tree, dict):
                    raise self._is_other(line, "no object")
                yield line, dict(_flat(tree))

    def _read(self) -> list[dict[str, str]]:
        tree = self._parsed("".join(text_lines(self.path)), 1)
        if isinstance(tree, dict) and all(isinstance(tree.get(one), list) for one in _TABLES):
            try:
                return _of_coco(*(tree[one] for one in _TABLES))
            except (KeyError, TypeError, AttributeError) as error:
                raise self._is_other(1, f"COCO's tables without {error}") from None
        if not isinstance(tree, list) or not all(isinstance(one, dict) for one in tree):
            raise self._is_other(1, "neither a list of objects nor COCO's tables")
        return [dict(_flat(one)) for one in tree]

    def _parsed(self, text: str, line: int) -> object:
        try:
            tree: object = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._is_other(line, str(error)) from None
        return tree

    def _is_other(self, line: int, reason: str) -> DataError:
        return DataError(
            "list.not-json",
            "{path}, line {line}: {reason}; expected an object for each image, a list of them, or "
            "COCO's images, annotations and categories",
            path=self.path,
            line=line,
            reason=reason,
        )


def _flat(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        elif isinstance(value, list):
            yield above + name, "".join(f"{one}{END}" for one in value)
        else:
            yield above + name, "" if value is None else str(value)


def _of_coco(
    images: list[Any], annotations: list[Any], categories: list[Any]
) -> list[dict[str, str]]:
    """The file and the names of the categories of each image."""
    name_of = {one["id"]: f"{one['name']}" for one in categories}
    if len({*name_of.values()}) < len(categories):
        raise KeyError("a name of its own for each category")
    labels: dict[Any, dict[str, None]] = {one["id"]: {} for one in images}
    for one in annotations:
        labels[one["image_id"]][name_of[one["category_id"]]] = None
    is_list = any(len(names) > 1 for names in labels.values())
    end = END if is_list else ""
    return [
        {
            "file_name": str(one["file_name"]),
            "label": "".join(f"{name}{end}" for name in labels[one["id"]]),
        }
        for one in images
    ]
