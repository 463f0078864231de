"""A list that gives each image its split: `1 0` of CUB-200, `000001.jpg 2` of CelebA.

`LIST#split=FILE` joins it to a list, by the cell of the image or by an id in another column.
"""

import os
from collections.abc import Sequence

from trainyard.data.formats.columns import NUMBERED, split_of_cell
from trainyard.data.formats.list_text import Table
from trainyard.data.formats.split_names import is_split_word, split_named, splits_named, words_of
from trainyard.errors import DataError


def names_splits(path: str) -> bool:
    """True for the name of such a list: `list_eval_partition.txt`, but not `train_split.txt`."""
    name = os.path.basename(path)
    words = {*words_of(name)}
    is_split = not words.isdisjoint(("split", "splits")) and len(splits_named(name)) != 1
    return is_split or "partition" in words


def are_splits(cells: Sequence[str]) -> bool:
    """True for numbers or words of splits alone."""
    return all(cell in NUMBERED or is_split_word(cell.lower()) for cell in cells)


def read_splits(path: str) -> dict[str, str]:
    """The split of each image by its cell or id. DataError for a list of another kind.

    1 and 0 alone say yes and no to the first split in the file's name: `train_test_split.txt`.
    """
    table = Table(path, lambda cells: are_splits([cells[-1].strip()]))
    rows = list[tuple[int, str, str]]()
    if len(table.names) == 2:
        rows = [(line, key.strip(), value.strip()) for line, (key, value) in table.rows()]
    values = {value for _, _, value in rows}
    words = words_of(os.path.basename(path))
    asked = next(filter(None, map(split_named, words)), "") if values <= {"0", "1"} else ""
    found = dict[str, str]()
    for line, key, value in rows:
        split = (asked and split_of_cell(asked, value)) or NUMBERED.get(value) or split_named(value)
        if not split or found.setdefault(key, split) != split:
            raise DataError(
                "list.split-of-row",
                "{path}, line {line}: {value!r} is no split of {image}, or not the only one",
                path=path,
                line=line,
                value=value,
                image=key,
            )
    if not found:
        raise DataError(
            "list.no-splits",
            "{path}: is no list of splits: expected two columns, an image or its id, and train, "
            "val or test, 0, 1 or 2",
            path=path,
        )
    return found
