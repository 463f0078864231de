"""Runs each copy through the library as a person would, and compares with the truth."""

import hashlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from tests.data.looks import silent
from tests.data.tars import open_splits
from tests.layouts import of_folders, of_lists, of_shards
from tests.layouts.copies import LAYOUTS, Copy, Layout
from trainyard.data.config import DataConfig
from trainyard.data.decode.packed_record import pixels_of
from trainyard.data.index.layout import location_remarks
from trainyard.data.index.merge import merged_splits, open_merged, validation_splits
from trainyard.data.index.table import Index
from trainyard.data.open_datasets import (
    data_remarks,
    open_datasets,
    what_is_left_out,
    what_is_lost,
)
from trainyard.data.reading.reader import Reader
from trainyard.datasets.prepare.cifar import prepare_cifar
from trainyard.datasets.prepare.mnist import prepare_mnist
from trainyard.datasets.prepare.preparation import Preparation
from trainyard.errors import TrainyardError
from trainyard.world import World

TABLES = (of_folders, of_lists, of_shards)
PAGE = Path(__file__).parents[2] / "docs/data-sets.md"

ITSELF, ONE, STEP, NO_STEP, TOLD, SILENT = VERDICTS = (
    "by itself",
    "one word",
    "an error names the step",
    "an error",
    "a warning",
    "SILENT",
)
NO_SPLIT = ", without the authors' split, told"
_HEAD = """\
# Public data sets: what to type

Small copies of these data sets, with the names, folders and lists of their authors, went through
Trainyard, and every image was compared with its true class and split. `DIR` is the folder that the
data set was unpacked into. Options go after a recipe, as in `trainyard train finetune --data DIR`.
The last column is what torchvision, timm, Ultralytics and `datasets` made of such copies.
`python -m tests.layouts` makes this page.
"""
_TABLE = ["", "| data set | type | verdict | others |", "|---|---|---|---|"]
_SHARE = 0.1
_DOUBT = "are taken for classes, though"


class Found(NamedTuple):
    """The outcome of an attempt."""

    verdict: str
    """ITSELF, STEP, TOLD, or SILENT; an error that names no step is NO_STEP."""
    text: str


def tried(copy: Copy, layout: Layout, words: str) -> Found:
    """The outcome of options that a person types."""
    try:
        sides, remarks = _opened(copy.root, words)
    except TrainyardError as error:
        is_step = layout.told and re.search(layout.told, str(error))
        return Found(STEP if is_step else NO_STEP, str(error))
    wrong = [*_wrong_classes(copy, sides)]
    apart = [] if wrong else [*_wrong_splits(copy, sides)]
    told = "\n".join(remarks)
    is_told = layout.told and re.search(layout.told, told)
    if wrong:
        return Found(TOLD if is_told or _DOUBT in told else SILENT, f"{wrong[0]}; {told}")
    if apart:
        return Found(ITSELF + NO_SPLIT if is_told else SILENT, f"{apart[0]}; {told}")
    return Found(ITSELF, told)


def is_evaluated(layout: Layout) -> bool:
    """True for images to evaluate a model on, not to train on."""
    return layout.words[:1] == ("trainyard evaluate RUN --data DIR",)


def verdict(layout: Layout, folder: Path) -> tuple[str, str, str]:
    """What a copy in a new folder comes to: its verdict, words for it, and the first text."""
    copy = Copy(folder)
    layout.build(copy)
    itself, *others = layout.words[:1] if is_evaluated(layout) else ("--data DIR", *layout.words)
    first = tried(copy, layout, itself)
    if first.verdict in (ITSELF, SILENT):
        return first.verdict, itself, first.text
    found = [(tried(copy, layout, words), words) for words in others]
    named = [(one, words) for one, words in found if one.verdict.startswith(ITSELF)]
    for one, words in sorted(named, key=lambda pair: len(pair[0].verdict)):
        if one.verdict == ITSELF or not first.verdict.startswith(ITSELF):
            return one.verdict.replace(ITSELF, ONE), words, first.text
    for one, words in found:
        if one.verdict == SILENT:
            return SILENT, words, one.text
    return first.verdict, itself, first.text


def _opened(root: Path, words: str) -> tuple[dict[str, Index], list[str]]:
    """The indices of both sides, and the remarks; "all" where a share of it validates."""
    out = root.with_name(f"{root.name}-out")
    command = [one.replace("DIR", str(root)) for one in shlex.split(words)]
    if command[:3] == ["trainyard", "data", "prepare"]:
        return _prepared(command[3], command[4], out), []
    if command[0] == "trainyard":  # evaluate RUN --data DIR
        index = open_merged(validation_splits([command[-1]]), None)
        return {"val": index}, what_is_left_out([index])
    options = dict(zip(command[::2], command[1::2], strict=True))
    remarks = []
    if "--data" in options:
        remarks += location_remarks(options["--data"])
        found = merged_splits([options["--data"]], may_share=True)
        train, val = found["train"], found["val"]
    else:
        train, val = options["--data.train"], options.get("--data.val")
    share = None if val else _SHARE
    config = DataConfig.model_validate({"train": train, "val": val, "val_share": share})
    data = open_datasets(config, World(), lambda *_: None)
    assert isinstance(data.train, Index)
    both = (data.train, data.val)
    remarks += [*data_remarks(config, data), *what_is_left_out(both), *what_is_lost(*both)]
    if val is None:
        return {"all, a part of it": data.train, "all": data.val}, remarks
    return {"train": data.train, "val": data.val}, remarks


def _prepared(name: str, source: str, out: Path) -> dict[str, Index]:
    prepare = prepare_cifar if name.startswith("cifar") else prepare_mnist
    with redirect_stderr(StringIO()):  # these are other counts than the official ones
        prepare(name, Path(source), Preparation(out, silent, format="packed"))
    return open_splits(out)


def _samples(copy: Copy, index: Index) -> Iterator[tuple[bytes, frozenset[str]]]:
    """The SHA-256 of each image, and its classes."""
    reader = Reader(index)
    for number in range(len(index)):
        content = reader.read(number)
        if index.format == "packed":
            content = pixels_of(content).tobytes()
        names = (copy.names.get(name, name) for name in index.class_names(number))
        yield hashlib.sha256(content).digest(), frozenset(names)


def _wrong_classes(copy: Copy, sides: dict[str, Index]) -> Iterator[str]:
    for side, index in sides.items():
        for digest, names in _samples(copy, index):
            truth = copy.truth.get(digest)
            right = truth and frozenset(copy.names.get(name, name) for name in truth.classes)
            if truth is None or truth.split == "" or names != right:
                yield f"{side}: {sorted(names)} instead of {truth}"


def _wrong_splits(copy: Copy, sides: dict[str, Index]) -> Iterator[str]:
    """Images on another side than their authors have them, and those that are on none."""
    seen = set()
    has_val = any(truth.split == "val" for truth in copy.truth.values())
    for side, index in sides.items():
        for digest, _ in _samples(copy, index):
            seen.add(digest)
            split = copy.truth[digest].split
            if (split == "train") != (side != "val"):
                yield f"{side}: holds an image of {split}"
    for digest, truth in copy.truth.items():
        is_wanted = truth.split in ("train", "val") or (truth.split == "test" and not has_val)
        if digest not in seen and is_wanted:
            yield f"an image of {truth.split} is in none of {', '.join(sides)}"


def page(rows: Sequence[tuple[Layout, str, str]]) -> str:
    """docs/data-sets.md: what to type for each data set."""
    lines = [
        _HEAD,
        *_counts(rows),
        "",
        "| data set | type | verdict | others |",
        "|---|---|---|---|",
    ]
    for layout, found, words in sorted(rows, key=lambda row: row[0].name.lower()):
        is_typed = found.startswith((ITSELF, ONE))
        what = f"`{words}`" if is_typed or not layout.note else layout.note
        cells = (layout.name, what.replace("|", "\\|"), found, layout.others)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _counts(rows: Sequence[tuple[Layout, str, str]]) -> list[str]:
    counts = Counter(found for _, found, _ in rows)
    kinds = sorted(counts, key=lambda found: [VERDICTS.index(found.partition(",")[0]), found])
    return [f"| {len(rows)} data sets | |", "|---|---|", *(f"| {k} | {counts[k]} |" for k in kinds)]


def all_rows(folder: Path) -> Iterator[tuple[Layout, str, str, str]]:
    """Each layout with its verdict, its words and the text of the first attempt."""
    os.environ["TRAINYARD_CACHE"] = str(folder / "cache")
    for number, layout in enumerate(LAYOUTS):
        yield layout, *verdict(layout, folder / f"set-{number}")
