"""Helpers of several commands: they find a run or checkpoint, and load torch."""

import argparse
import atexit
import gc
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainyard.arguments import Parser, enlarging, positive
from trainyard.data.storage.source import is_remote
from trainyard.errors import CheckpointError, InputError
from trainyard.files import RunDirectory, find_checkpoint
from trainyard.world import usable_cores

_HIDDEN = "wandb"
_EXPORTS = (".onnx", ".pt2", ".safetensors", ".html")
SECTIONS = ("model", "data", "batch")  # sections of recipe keys that a trained model can depend on


def add_json(parser: Parser) -> None:
    """Add the option --json."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_processes(parser: Parser) -> None:
    """Add the option --processes."""
    text = "number of processes; default: one per core"
    cores = usable_cores()
    parser.add_argument("--processes", type=positive, default=cores, metavar="N", help=text)


def suffix_of(path: str) -> str:
    """The ending of a file to write, in lower case; "" for a folder."""
    return "" if path.endswith(os.sep) or os.path.isdir(path) else Path(path).suffix.lower()


def check_suffix(path: str | None, option: str, *suffixes: str) -> None:
    """InputError unless a path to write, if there is one, has one of these in `suffix_of`."""
    if path and suffix_of(path) not in suffixes:
        raise InputError(
            "option.wrong-suffix",
            "{option} {path}: name a file that ends in {suffix}{hint}",
            option=option,
            path=path,
            suffix=" or ".join(filter(None, suffixes)),
            hint=", or a folder" if "" in suffixes else "",
        )


def add_outs(parser: Parser, text: str) -> None:
    """Add --out, of which each path is of the kind that `suffix_of` tells."""
    text += "; can be given again"
    parser.add_argument("--out", metavar="PATH", action="append", default=[], help=text)


def outs(options: argparse.Namespace, suffix: str) -> list[Path]:
    """The paths of --out with this suffix, "" for folders."""
    return [Path(path) for path in options.out if suffix_of(path) == suffix]


# --- a trained model ---


def add_target(parser: Parser, besides: str = "") -> None:
    """Add the argument that names a run or a checkpoint; `besides`: what else it may name."""
    parser.add_argument(
        "target",
        metavar="RUN_OR_CHECKPOINT",
        help=f"a run (its best checkpoint) or a checkpoint{besides}",
    )


def add_others(parser: Parser) -> None:
    """Add --with, further runs that are taken together with the first, kept as `others`."""
    parser.add_argument(
        "--with",
        metavar="RUN",
        dest="others",
        action="append",
        default=[],
        help="take another run, or all in a folder, together with the first: the mean of their "
        "weights, if they share their start and it is not worse on the validation images than the "
        "best of them, else that of their probabilities; can be given again",
    )


def others_of(options: argparse.Namespace) -> list[tuple[Path, Path]]:
    """The run directories and checkpoints of --with, without the first run. CheckpointError."""
    found = {}
    for path in map(Path, options.others):
        for run in [path] if is_checkpoint(str(path)) else _runs_in(path) or [path]:
            folder, checkpoint = find_checkpoint(run)
            found[checkpoint] = folder
    found.pop(find_checkpoint(Path(options.target))[1].resolve(), None)
    return [(folder, checkpoint) for checkpoint, folder in found.items()]


def _runs_in(folder: Path) -> list[Path]:
    runs = sorted(folder.iterdir()) if folder.is_dir() else []
    return [run for run in runs if RunDirectory(run).recipe.is_file()]


def add_ema(parser: Parser, default: str = "the average, unless it scored worse") -> None:
    """Add --ema, --no-ema and --ema-decay, all kept as `ema`."""
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="take the moving average of the weights alone, the best of several, or the raw "
        f"weights alone (--no-ema); default: {default}",
    )
    parser.add_argument(
        "--ema-decay",
        metavar="DECAY",
        dest="ema",
        type=float,
        help="use the moving average of this decay, of a run with several",
    )


def add_views(parser: Parser) -> None:
    """Add --flip and --scales, the views of an image whose probabilities are averaged."""
    parser.add_argument(
        "--flip",
        action="store_true",
        help="take the mean of the probabilities of each image and of its mirror image",
    )
    parser.add_argument(
        "--scales",
        metavar="S,S",
        type=enlarging,
        default=(1.0,),
        help="take the mean over scales: 1,1.15 is that of the image and of its middle, 1.15 times "
        "as large",
    )


def check_target(options: argparse.Namespace, others: Sequence[str] = ()) -> tuple[Path, Path]:
    """The run directory and the checkpoint to take, found before torch is loaded.

    CheckpointError if there is none. It suggests the command for a run among `others`, later
    arguments, and for data as the target.
    """
    target, command = options.target, options.parser.prog
    try:
        return find_checkpoint(Path(target))
    except CheckpointError as error:
        hint = ""
        for number, other in enumerate(others):
            if is_checkpoint(other):
                rest = (target, *others[:number], *others[number + 1 :])
                hint = f"; did you mean {command} {shlex.join((other, *rest))}?"
        if not hint and Path(target).suffix in _EXPORTS:
            hint = (
                f"; an export: {target}.md has the code that runs it, and {command} takes its run"
            )
        if not hint and "data" in options and (is_remote(target) or has_folders(target)):
            hint = f"; if it is data: {command} RUN --data {shlex.quote(target)}"
        error.fields["hint"] = hint
        raise


def is_export(options: argparse.Namespace) -> bool:
    """True if the target is an exported file; InputError for options that are for a run."""
    path = Path(options.target)
    if path.suffix.lower() not in _EXPORTS or not path.is_file():
        return False
    given = [f"--{key}" for key in options.overrides] + ["--ema"] * (options.ema is not None)
    given += ["--with"] * bool(options.others)
    if given:
        raise InputError(
            "option.of-run-beside-export",
            "{option}: is for a run, and {path} is an exported file, which has its own settings",
            option=given[0],
            path=path,
        )
    return True


def has_folders(target: str) -> bool:
    """True for a folder with folders in it, which is no run directory."""
    folder = Path(target)
    is_run = RunDirectory(folder).recipe.exists()
    return folder.is_dir() and not is_run and any(path.is_dir() for path in folder.iterdir())


def is_checkpoint(target: str) -> bool:
    """True if a path is a checkpoint folder or a run directory with one."""
    try:
        find_checkpoint(Path(target))
    except CheckpointError:
        return False
    return True


def check_overrides(keys: Iterable[str], what: str) -> None:
    """RecipeError for keys that have no effect on the command."""
    from trainyard.compare import check_keys

    check_keys(keys, what)


@contextmanager
def loading() -> Iterator[None]:
    """A block that imports torch, without searches for garbage among what stays anyway.

    The collector would visit the objects of modules again and again, and once more in each full
    collection of a run. They are handed back to it at the end: extensions such as nanobind's report
    what is left of them then. Inside, timm cannot import wandb, which it would wherever that is
    installed: a sixth of the start of a run, for a function that nobody calls.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    modules: dict[str, Any] = sys.modules
    modules.setdefault(_HIDDEN, None)
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)
    finally:
        if modules[_HIDDEN] is None:
            del modules[_HIDDEN]
        gc.enable()
