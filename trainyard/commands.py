"""What each command does: read its options, call one function, print what came of it."""

import argparse
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.errors import CheckpointError
from trainyard.world import discover

if TYPE_CHECKING:
    from trainyard.config import RunConfig
    from trainyard.data.index import Index


_MAX_CLASSES = 25  # rows of a class table; more is for machines


def train(options: argparse.Namespace) -> int:
    config, folder = _config(options), _run_folder(options)
    world = discover()
    if world.size > 1:
        # Until training begins, Ctrl-C kills as SIGTERM does: Python's own handler would wait for
        # torch to come back from a rendezvous that the other ranks have already left.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rich.console import Console

    from trainyard import run

    console = Console(quiet=options.json or not world.is_first)
    outcome = run.train(config, folder, world=world, console=console)
    if world.is_first:
        print(json.dumps(outcome.as_dict()) if options.json else outcome.sentence())
    return outcome.stopped.exit_code if outcome.stopped else 0


def launch_local(options: argparse.Namespace) -> int:
    _config(options)  # a mistake is told once, before anything starts
    arguments = ["train", options.recipe, "--run", str(_run_folder(options))]
    arguments += ["--data", options.data] if options.data is not None else []
    arguments += ["--json"] if options.json else []
    arguments += [f"--{key}={text}" for key, text in options.overrides.items()]
    if options.dry_run:
        ranks = options.ranks or "(one per GPU, or 1)"
        print(f"{ranks} x {shlex.join([sys.executable, '-m', 'trainyard', *arguments])}")
        return 0
    from trainyard.launch.local import launch_local as launch

    return launch(arguments, ranks=options.ranks or _num_devices())


def evaluate(options: argparse.Namespace) -> int:
    from trainyard.config import load_recipe

    run_folder, checkpoint = _find_checkpoint(Path(options.target))
    config = load_recipe(str(run_folder / "recipe.toml"))
    if options.data is not None:
        from trainyard.data.location import find_splits

        config = _with_data(config, {"val": find_splits(options.data).get("val", options.data)})
    world = discover()
    from rich.console import Console

    from trainyard import run

    console = Console(quiet=options.json or not world.is_first)
    result = run.evaluate_checkpoint(config, checkpoint, world=world, console=console)
    if world.is_first and options.json:
        print(json.dumps(result.as_dict()))
    elif world.is_first:
        accuracies = [f"{result.top1:.2%}", f"{result.top5:.2%}", f"{result.loss:.4f}"]
        row = [f"{result.samples:,}", f"{result.bad:,}", *accuracies]
        _print_table(["samples", "unreadable", "top-1", "top-5", "loss"], [row])
    return 0


def recipes(options: argparse.Namespace) -> int:
    from trainyard.config import find_recipe, load_recipe, to_toml

    if options.keys or not options.name:
        rows = _keys() if options.keys else _recipes()
        if options.json:
            print(json.dumps(rows))
        else:
            _print_table(list(rows[0]), [list(map(_text, row.values())) for row in rows])
        return 0
    config = load_recipe(options.name)
    if options.json:
        print(config.model_dump_json())
    else:
        print(f"# {find_recipe(options.name)}\n\n{to_toml(config)}")
    return 0


def _keys() -> list[dict[str, Any]]:
    from trainyard.config import all_keys

    return [
        {"key": key, "default": field.get_default(), "meaning": field.description}
        for key, field in all_keys().items()
    ]


def _recipes() -> list[dict[str, Any]]:
    from trainyard.config import builtin_recipes, load_recipe

    rows = []
    for name, path in builtin_recipes().items():
        config = load_recipe(name)
        rows.append(
            {
                "recipe": name,
                "model": config.model.name,
                "batch": config.batch.size,
                "length": config.run.length,
                "about": path.read_text().splitlines()[0].lstrip("# "),
            }
        )
    return rows


def data_prepare(options: argparse.Namespace) -> int:
    from trainyard.data.digits import prepare_digits

    counts = prepare_digits(Path(options.destination))
    print(
        f"{options.destination}: {counts['train']:,} images to train, {counts['val']:,} to validate"
    )
    return 0


def data_index(options: argparse.Namespace) -> int:
    from rich.console import Console

    from trainyard.data.index import build_index
    from trainyard.monitor.progress import counter

    found = {}
    for split, location in _splits(options.location).items():
        with counter(Console(stderr=True), f"indexing {location}") as progress:
            index = build_index(location, progress)
        found[split] = {
            "samples": len(index),
            "index": str(index.path),
            "fingerprint": index.fingerprint,
        }
    if options.json:
        print(json.dumps(found))
    for split, about in {} if options.json else found.items():
        print(f"{split}: {about['samples']:,} samples, index in {about['index']}")
    return 0


def data_show(options: argparse.Namespace) -> int:
    from rich.console import Console

    from trainyard.data.index import open_index
    from trainyard.monitor.progress import counter

    found = {}
    for split, location in _splits(options.location).items():
        with counter(Console(stderr=True), f"indexing {location}") as progress:
            found[split] = _describe(open_index(location, progress))
    if options.json:
        print(json.dumps(next(iter(found.values())) if len(found) == 1 else found))
        return 0
    rows = [_summary(split, about) for split, about in found.items()]
    _print_table(["data", "format", "samples", "size", "classes"], rows)
    names = next(iter(found.values()))["classes"]
    rows = []
    for number, name in enumerate(names[:_MAX_CLASSES]):
        counts = [f"{about['per_class'].get(name, 0):,}" for about in found.values()]
        rows.append([str(number), name, *counts])
    _print_table(["number", "class", *found], rows)
    if len(names) > _MAX_CLASSES:
        print(f"and {len(names) - _MAX_CLASSES:,} classes more: --json lists them all")
    return 0


# --- from options to what a function takes ---


def _config(options: argparse.Namespace) -> "RunConfig":
    from trainyard.config import load_recipe
    from trainyard.data.location import train_and_val

    overrides = dict(options.overrides)
    if options.data is not None:
        overrides |= {
            f"data.{split}": place for split, place in train_and_val(options.data).items()
        }
    return load_recipe(options.recipe, overrides)


def _with_data(config: "RunConfig", splits: dict[str, str]) -> "RunConfig":
    return config.model_copy(update={"data": config.data.model_copy(update=splits)})


def _run_folder(options: argparse.Namespace) -> Path:
    return Path(options.run or Path("runs") / Path(options.recipe).stem)


def _num_devices() -> int:
    import torch

    return max(torch.cuda.device_count(), 1)


def _find_checkpoint(target: Path) -> tuple[Path, Path]:
    """The run directory and the checkpoint that a run or checkpoint path means."""
    if (target / "checkpoints").is_dir():
        for name in ("best", "latest"):
            if (target / "checkpoints" / name).exists():
                return target, (target / "checkpoints" / name).resolve()
        raise CheckpointError(f"{target}: has no checkpoint yet")
    if (target / "manifest.json").is_file():
        return target.resolve().parent.parent, target.resolve()
    raise CheckpointError(f"{target}: neither a run directory nor a checkpoint")


def _splits(location: str) -> dict[str, str]:
    """A data set's splits, or the location itself under the name of its folder."""
    from trainyard.data.location import find_splits, is_file_list

    splits = {} if is_file_list(location) else find_splits(location)
    return splits or {"data": location}


# --- printing ---


def _describe(index: "Index") -> dict[str, Any]:
    import numpy as np

    counts = np.bincount(index.label, minlength=len(index.classes)).tolist()
    return {
        "format": index.format,
        "samples": len(index),
        "bytes": int(index.size.sum()),
        "classes": list(index.classes),
        "per_class": dict(zip(index.classes, counts, strict=True)),
    }


def _summary(split: str, about: dict[str, Any]) -> list[str]:
    samples, classes = f"{about['samples']:,}", f"{len(about['classes']):,}"
    return [split, about["format"], samples, _size(about["bytes"]), classes]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def _print_table(columns: list[str], rows: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)  # a class may be called [a]
