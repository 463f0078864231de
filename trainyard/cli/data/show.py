"""`trainyard data show`: contents of a data set."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.arguments import positive
from trainyard.cli.data.index import add_division, add_location, division_of
from trainyard.cli.options import check_suffix, loading
from trainyard.cli.printing import naming, print_table
from trainyard.errors import InputError
from trainyard.hints import did_you_mean
from trainyard.printable import in_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

    from trainyard.data.index.table import Index
    from trainyard.data.index.val_share import Side
    from trainyard.datasets.contact_sheet import Ids

_MAX_CLASSES = 25  # rows of a class table; --json lists all
_EXTREMES = 10  # number of largest and of smallest classes shown instead
_ROWS, _COLUMNS = 6, 8  # of a contact sheet
_SECTIONS = ("data", "augment", "batch")  # of keys that can affect an augmented image


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard data show` to its parser."""
    add_location(parser)
    add_division(parser)
    sheet = parser.add_argument_group("contact sheet")
    sheet.add_argument("--out", metavar="FILE.png", help="draw random images, with labels")
    sheet.add_argument("--split", metavar="NAME", help="split to draw from; default: train")
    sheet.add_argument("--class", metavar="NAME", dest="class_name", help="draw only this class")
    sheet.add_argument("--rows", metavar="R", type=_few, default=_ROWS, help="default: 6")
    sheet.add_argument("--columns", metavar="C", type=_few, default=_COLUMNS, help="default: 8")
    sheet.add_argument(
        "--seed", metavar="S", type=int, default=0, help="seed of the draw; default: 0"
    )
    sheet.add_argument(
        "--augmented",
        metavar="RECIPE",
        help="a row for each image, as this recipe's training sees it in its first epochs; recipe "
        "keys may follow, --augment.mixup 0.2 say",
    )
    parser.set_defaults(run_command=data_show, takes_overrides=_SECTIONS)


def _few(text: str) -> int:
    if (count := positive(text)) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1 and 100")
    return count


def data_show(options: argparse.Namespace) -> int:
    """Run `trainyard data show`. Returns the exit code."""
    chosen = (options.split, options.class_name, options.rows, options.columns, options.seed)
    is_chosen = chosen != (None, None, _ROWS, _COLUMNS, 0) or options.augmented is not None
    if options.out is None and is_chosen:
        raise InputError(
            "option.needs-sheet",
            "--split, --class, --rows, --columns, --seed and --augmented are for a contact sheet: "
            "add --out FILE.png",
        )
    if options.overrides:
        _check_overrides(options)
    check_suffix(options.out, "--out", ".png")  # before all is indexed
    indices = open_splits(options.location, division=division_of(options))
    if options.out is not None:
        _draw_sheet(options, indices)
    described = {split: _describe(index) for split, index in indices.items()}
    if options.json:
        print(json.dumps(next(iter(described.values())) if len(described) == 1 else described))
        return 0
    _print_summary(described)
    _print_classes(described)
    if options.out is not None:
        print(f"contact sheet in {options.out}")
    return 0


def _check_overrides(options: argparse.Namespace) -> None:
    from trainyard.compare import check_keys

    if options.augmented is None:
        raise InputError(
            "option.needs-augmented",
            "--{key} is for a sheet of augmented images: add --augmented RECIPE",
            key=next(iter(options.overrides)),
        )
    check_keys(options.overrides, "a sheet", _SECTIONS)


def open_splits(
    location: str,
    *,
    one_label_space: bool = False,
    division: "tuple[Side, ...]" = (),
) -> dict[str, "Index"]:
    """The indices of all splits of a data set, with a counter and remarks on the screen.

    With `one_label_space`, labels are numbers of the first split's classes; DataError for others.
    `division`: the sides of data without val data, each with an index of its own.
    """
    from rich.console import Console

    from trainyard.data.index.label_space import name_remarks
    from trainyard.data.index.layout import location_remarks
    from trainyard.data.index.merge import open_merged
    from trainyard.data.index.splits import all_splits
    from trainyard.data.open_datasets import warn, what_is_left_out
    from trainyard.monitor.progress import counter

    console, indices = Console(stderr=True), dict[str, "Index"]()
    warn(console, location_remarks(location))
    for split, source in all_splits(location, is_divided=bool(division)).items():
        first = next(iter(indices.values()), None)
        known = first.classes if first and one_label_space else None
        for side in division or (None,):
            with counter(console, f"indexing {source}") as progress:
                name = split if side is None else side.split
                indices[name] = open_merged([source], known, progress, side)
    warn(console, what_is_left_out(indices.values()))
    named = [index.classes for index in indices.values() if index.has_names]
    warn(console, dict.fromkeys(text for names in named for text in name_remarks(names)))
    return indices


def _describe(index: "Index") -> dict[str, Any]:
    import numpy as np

    counts = index.samples_per_class().tolist()
    return {
        "format": index.format,
        "samples": len(index),
        "left_out": {
            kind: {"count": count, "example": name}
            for kind, (count, name) in index.left_out.kinds.items()
        },
        "bytes": int(index.size.sum()),
        "image_bytes": {
            "min": int(index.size.min()),
            "median": int(np.median(index.size)),
            "max": int(index.size.max()),
        },
        "classes": list(index.classes),
        **({"labels": sum(counts)} if index.lists is not None else {}),
        "per_class": dict(zip(index.classes, counts, strict=True)),
    }


def _print_summary(described: dict[str, dict[str, Any]]) -> None:
    rows = {
        "format": [summary["format"] for summary in described.values()],
        "samples": [f"{summary['samples']:,}" for summary in described.values()],
        "classes": [f"{len(summary['classes']):,}" for summary in described.values()],
        "size": [in_bytes(summary["bytes"]) for summary in described.values()],
    }
    if "labels" in next(iter(described.values())):
        rows["labels"] = [
            f"{summary.get('labels', summary['samples']):,}" for summary in described.values()
        ]
    for key, what in (("min", "smallest"), ("median", "median"), ("max", "largest")):
        rows[f"{what} image"] = [
            in_bytes(summary["image_bytes"][key]) for summary in described.values()
        ]
    print_table(["data", *described], [[what, *values] for what, values in rows.items()])


def _print_classes(described: dict[str, dict[str, Any]]) -> None:
    first = next(iter(described.values()))
    names = first["classes"]
    numbers = list(range(len(names)))
    if len(names) > _MAX_CLASSES:  # the largest and the smallest
        numbers.sort(key=lambda number: -first["per_class"][names[number]])
        numbers = [*numbers[:_EXTREMES], -1, *numbers[-_EXTREMES:]]
    rows = []
    for number in numbers:
        name = "" if number < 0 else names[number]
        counts = [f"{summary['per_class'].get(name, 0):,}" for summary in described.values()]
        gap = ["", f"{len(names) - 2 * _EXTREMES:,} more", *("" for _ in described)]
        rows.append(gap if number < 0 else [str(number), name, *counts])
    print_table(["number", "class", *described], rows)
    if len(names) > _MAX_CLASSES:
        print(f"the largest and the smallest of {len(names):,} classes: --json lists them all")


# --- the contact sheet ---


def _draw_sheet(options: argparse.Namespace, indices: dict[str, "Index"]) -> None:
    from trainyard.datasets.contact_sheet import contact_sheet, random_samples, save_sheet

    path = Path(options.out)
    split = options.split or next(iter(indices))
    if split not in indices:
        hint = did_you_mean(split, indices) or f", but {', '.join(indices)}"
        raise InputError(
            "data.no-such-split",
            "{location}: has no split {split!r}{hint}",
            location=options.location,
            split=split,
            hint=hint,
        )
    index, name = indices[split], options.class_name
    label = None if name is None else _class_number(index, name)
    count = options.rows * (1 if options.augmented else options.columns)
    samples = random_samples(index, count, options.seed, label)
    of = f"{len(index):,} images in {len(index.classes):,} classes"
    if label is not None:
        of = f"{index.samples_per_class()[label]:,} images of class {name}"
    facts = (f"{len(samples)} of {of}", index.format, in_bytes(int(index.size.sum())))
    title = (
        f"{options.location}  ·  {split}",
        "  ·  ".join((*facts, f"seed {options.seed}")),
    )
    if options.augmented and len(samples):
        sheet = _augmented(options, index, samples, title[0])
    else:
        sheet = contact_sheet(index, samples, options.columns, title)
    with naming("--out", path):
        save_sheet(path, sheet)


def _augmented(options: argparse.Namespace, index: "Index", samples: "Ids", title: str) -> "Image":
    """A sheet by the loader and the feed that a run of the recipe would have."""
    from dataclasses import replace

    from trainyard.config import load_recipe

    config = load_recipe(options.augmented, options.overrides)
    with loading():
        import torch

        from trainyard.datasets.augmented import augmented_sheet
        from trainyard.run.build import build_feeds, check_decoding, check_extra_transform
        from trainyard.world import World, pick_device

    device = pick_device(World())
    check_decoding(config, device)
    check_extra_transform(config, index, device)
    feeds = replace(build_feeds(config, World(), device), dtype=torch.float32)
    caption = f"{options.augmented}, seed {config.run.seed}: as stored, then in the first epochs"
    return augmented_sheet(index, samples, feeds, visits=options.columns, title=(title, caption))


def _class_number(index: "Index", name: str) -> int:
    if name in index.classes:
        return index.classes.index(name)
    meant = did_you_mean(name, index.classes) or "; `trainyard data show` lists the classes"
    raise InputError(
        "data.no-such-class", "--class {name}: no such class{hint}", name=name, hint=meant
    )
