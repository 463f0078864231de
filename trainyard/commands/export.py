"""`trainyard export`: writes a trained model for other programs."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.commands.checkpoints import SECTIONS, add_checkpoint, check_overrides, check_target
from trainyard.commands.printing import print_text, size
from trainyard.errors import InputError

if TYPE_CHECKING:
    from trainyard.export.export import Export

_KINDS = ("safetensors", "onnx", "pt2")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard export` to its parser."""
    add_checkpoint(parser)
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="file name that ends in .safetensors, .onnx or .pt2"
    )
    parser.add_argument("--format", choices=_KINDS, help="format of a file with another ending")
    parser.add_argument(
        "--hub",
        metavar="DIR",
        help="a folder in the layout of timm's hub, for timm.create_model('local-dir:DIR', "
        "pretrained=True)",
    )
    parser.add_argument("--json", action="store_true", help="print the written files as JSON")
    parser.epilog = (
        "Each exported model is loaded again and compared with the trained one before it is put "
        "in place. It takes normalised images, float32[batch, channels, size, size]; its card and "
        "metadata hold mean, std, size and classes. --data.eval_size 288 exports it for images of "
        "that size."
    )
    parser.set_defaults(run_command=export, takes_overrides=SECTIONS)


def export(options: argparse.Namespace) -> int:
    """Run `trainyard export`. Returns the exit code."""
    check_overrides(options.overrides, "an export")
    if options.file is None and options.hub is None:
        raise InputError("name a FILE to export to, a folder with --hub, or both")
    if options.file is None and options.format is not None:
        raise InputError(f"--format {options.format} is for a FILE, which is not named")
    if options.file is not None and Path(options.target).suffix[1:] in _KINDS:
        check_target(options, [options.file])
    kind = None if options.file is None else options.format or _kind_of(options.file)
    from rich.console import Console

    from trainyard.classifier import load
    from trainyard.export.export import Exporter, check_file, check_hub

    if kind is not None:
        check_file(Path(options.file), kind)
    if options.hub is not None:
        check_hub(Path(options.hub))
    with Console(stderr=True).status("exporting"):
        exporter = Exporter(load(options.target, ema=options.ema, overrides=options.overrides))
        written = [] if kind is None else [exporter.to_file(Path(options.file), kind)]
        if options.hub is not None:
            written.append(exporter.to_hub(Path(options.hub)))
    if options.json:
        print(json.dumps({"exports": [_as_json(one) for one in written]}))
        return 0
    for one in written:
        print_text(_line(one))
    return 0


def _kind_of(file: str) -> str:
    kind = Path(file).suffix.removeprefix(".")
    if kind not in _KINDS:
        raise InputError(f"{file}: the name does not end in .{', .'.join(_KINDS)}; add --format")
    return kind


def _as_json(one: "Export") -> dict[str, object]:
    return {
        "path": str(one.path),
        "format": one.kind,
        "bytes": one.bytes,
        "max_difference": one.difference.largest,
        "relative_difference": one.difference.relative,
        "images": one.difference.images,
    }


def _line(one: "Export") -> str:
    images = one.difference.images
    on = f"{images} validation images and noise" if images else "noise; no validation data at hand"
    largest = one.difference.largest
    same = f"logits differ by {largest:.1e} at most" if largest else "logits are the same"
    return f"{one.path}: {size(one.bytes)}, {same} (on {on})"
