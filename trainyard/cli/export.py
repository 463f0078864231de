"""`trainyard export`: writes a trained model for other programs."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.arguments import Parser, number, positive
from trainyard.cli.options import (
    SECTIONS,
    add_ema,
    add_json,
    add_others,
    add_target,
    check_overrides,
    check_target,
    loading,
    others_of,
)
from trainyard.cli.printing import print_text
from trainyard.errors import InputError
from trainyard.export import IMAGES, OPSET, TOLERANCE
from trainyard.monitor.history import METRICS
from trainyard.printable import how_many, in_bytes

if TYPE_CHECKING:
    from trainyard.export.check import Times
    from trainyard.export.export import Export
    from trainyard.export.push import Repository

_KINDS = ("safetensors", "onnx", "pt2", "html")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard export` to its parser."""
    add_target(parser)
    text = (
        "file name that ends in .safetensors, .onnx or .pt2, or .html for a page that classifies "
        "photographs in a browser"
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help=text)
    add_others(parser)
    add_ema(parser)
    add_json(parser)
    _add_file(parser.add_argument_group("what FILE is"))
    _add_measured(parser.add_argument_group("how it is measured"))
    add = parser.add_argument_group("what to write besides").add_argument
    add(
        "--hub",
        metavar="DIR",
        help="a folder in the layout of timm's hub, for timm.create_model('local-dir:DIR', "
        "pretrained=True)",
    )
    add(
        "--push",
        metavar="hf://OWNER/NAME[@REVISION]",
        help="upload the folder of --hub, and FILE beside it, to the Hugging Face Hub; the "
        "repository is created if there is none; the token is HF_TOKEN's or `hf auth login`'s",
    )
    add("--private", action="store_true", help="create a private repository")
    add("--license", metavar="ID", help="license of the weights in the card, such as apache-2.0")
    parser.epilog = (
        "Each exported model is loaded again by its own library and measured beside the trained "
        "one before it is put in place. Without --photograph it takes normalised images, "
        "float32[batch, channels, size, size]; its card and metadata hold mean, std, size and "
        "classes. --data.eval_size 288 exports it for images of that size."
    )
    parser.set_defaults(run_command=export, takes_overrides=SECTIONS)


def _add_file(group: Parser) -> None:
    add = group.add_argument
    add("--format", choices=_KINDS, help="format of a file with another ending")
    add(
        "--photograph",
        action="store_true",
        help="the .onnx or .pt2 file takes a photograph, uint8[height, width, channels] of any "
        "size, and gives the probabilities of the classes too",
    )
    add(
        "--onnxruntime-web",
        metavar="FILE.tgz",
        help="what a page runs by: the file of `npm pack onnxruntime-web`, or its folder",
    )
    add("--title", metavar="TEXT", help="title of a page; default: a question after its classes")
    add(
        "--int8",
        action="store_true",
        help="8 bits in the .onnx or .html file, calibrated on training images; layers that lose "
        "too much stay in float32",
    )
    add("--opset", metavar="N", type=positive, help=f"opset of an .onnx file; default: {OPSET}")


def _add_measured(group: Parser) -> None:
    add = group.add_argument
    add(
        "--images",
        metavar="N",
        type=positive,
        default=IMAGES,
        help=f"validation images on which the file is measured; default: {IMAGES}",
    )
    add(
        "--tolerance",
        metavar="POINTS",
        type=number,
        default=TOLERANCE,
        help=f"points of top-1, or mAP, that the file may lose on them; default: {TOLERANCE:g}",
    )
    add(
        "--data",
        metavar="LOCATION",
        help="training images to calibrate --int8 on, and validation images if it has them, in "
        "place of the run's own",
    )


def export(options: argparse.Namespace) -> int:
    """Run `trainyard export`. Returns the exit code."""
    check_overrides(options.overrides, "an export")
    _check_options(options)
    is_swapped = options.file is not None and Path(options.target).suffix[1:] in _KINDS
    check_target(options, [options.file] if is_swapped else [])
    others = [path for _, path in others_of(options)]
    kind = None if options.file is None else _kind_of(options)
    runtime = _runtime_of(options, kind)
    repository = _repository_of(options)
    from rich.console import Console

    with loading():
        from trainyard.export.export import Exporter, check_file, check_hub, check_one_model
    from trainyard.classifier import load

    if kind is not None:
        check_file(Path(options.file), kind)
    if options.hub is not None:
        check_hub(Path(options.hub))
    with Console(stderr=True).status("exporting"):
        overrides = options.overrides | _data_of(options)
        classifier = load([options.target, *others], ema=options.ema, overrides=overrides)
        check_one_model(classifier)
        names = ("license", "title", "images", "tolerance", "int8", "opset")
        how = {name: getattr(options, name) for name in names}
        exporter = Exporter(classifier, runtime=runtime, **how)
        if options.hub is not None:
            exporter.check_timm(f"--hub {options.hub}")
        written = [] if kind is None else [exporter.to_file(Path(options.file), kind)]
        results: list[tuple[str, Export, str | None]] = [(str(x.path), x, None) for x in written]
        if options.hub is not None:
            results.append((options.hub, exporter.to_hub(Path(options.hub)), None))
        if repository is not None:
            pushed = exporter.push(repository, written, private=options.private)
            results.append((repository.name, *pushed))
    if options.json:
        print(json.dumps({"exports": [_as_json(*result) for result in results]}))
    else:
        notes = [classifier.note] if others else []
        print_text(*notes, *(_line(*result) for result in results))
    return 0


def _check_options(options: argparse.Namespace) -> None:
    if options.file is None and options.hub is None and options.push is None:
        raise InputError(
            "export.no-destination",
            "name a FILE to export to, a folder with --hub, or --push hf://OWNER/NAME",
        )
    if options.file is None and options.format is not None:
        raise InputError(
            "option.format-without-file",
            "--format {value} is for a FILE, which is not named",
            value=options.format,
        )
    if options.file is None and options.photograph:
        raise InputError(
            "option.photograph-without-file", "--photograph needs FILE.onnx or FILE.pt2"
        )
    if options.opset is not None and options.opset < OPSET:
        raise InputError(
            "export.opset-too-old",
            "--opset {value}: torch writes {least} or newer: leave it out, or choose one of these",
            value=options.opset,
            least=OPSET,
        )
    if options.private and options.push is None:
        raise InputError(
            "option.private-without-push", "--private is for --push, which is not given"
        )


def _runtime_of(options: argparse.Namespace, kind: str | None) -> dict[str, bytes] | None:
    """The files of onnxruntime-web for a page."""
    package = options.onnxruntime_web
    given = {"--onnxruntime-web": package, "--title": options.title}
    for option in (name for name, value in given.items() if value is not None and kind != "html"):
        raise InputError(
            "export.runtime-without-page", "{option} is for a FILE.html", option=option
        )
    if kind != "html":
        return None
    if package is None:
        raise InputError(
            "export.page-without-runtime",
            "a page holds onnxruntime-web: get it by `npm pack onnxruntime-web`, and add "
            "--onnxruntime-web FILE.tgz",
        )
    from trainyard.export.page import read_runtime

    return read_runtime(Path(package))


def _data_of(options: argparse.Namespace) -> dict[str, str]:
    """The recipe keys that --data stands for."""
    if options.data is None:
        return {}
    from trainyard.config import refuse_beside_data
    from trainyard.data.index.merge import merged_splits

    refuse_beside_data(options.overrides, ("train", "val"))
    found = merged_splits([options.data], may_share=True)
    return {f"data.{s}": of if isinstance(of, str) else of[0] for s, of in found.items() if of}


def _repository_of(options: argparse.Namespace) -> "Repository | None":
    """Where to upload to; InputError now, not after the export, if the token is refused."""
    if options.push is None:
        return None
    from trainyard.export.push import Repository

    repository = Repository(options.push)
    repository.check()
    return repository


def _kind_of(options: argparse.Namespace) -> str:
    file, given = options.file, options.format
    kind = Path(file).suffix.removeprefix(".").lower()
    if kind not in _KINDS and given is None:
        raise InputError(
            "export.unknown-suffix",
            "{path}: the formats are .{names}; --format names that of a file with another ending"
            "{hint}",
            path=file,
            names=", .".join(_KINDS),
            hint=f"; others, .{kind} say, are made of an .onnx file by their own tools"
            * bool(kind),
        )
    if kind in _KINDS and given not in (None, kind):
        raise InputError(
            "export.format-differs-from-suffix",
            "{path}: ends in .{suffix}, and --format is {value}: leave one of them out, or name a "
            "file that ends in .{value}",
            path=file,
            suffix=kind,
            value=given,
        )
    kind = given or kind
    if options.photograph and kind not in ("onnx", "pt2"):
        raise InputError(
            "export.no-photograph-format",
            "{path}: --photograph is for an .onnx or a .pt2 file",
            path=file,
        )
    given = {"--int8": options.int8, "--opset": options.opset}
    for option in (name for name, value in given.items() if value and kind not in ("onnx", "html")):
        raise InputError(
            "export.option-of-onnx",
            "{path}: {option} is for an .onnx or an .html file",
            path=file,
            option=option,
        )
    return f"{kind}-photograph" if options.photograph else kind


def _as_json(name: str, one: "Export", commit: str | None) -> dict[str, object]:
    measured, metric = one.measured, one.metric
    record = {
        "path": name,
        "format": one.kind,
        "bytes": one.bytes,
        "precision": "float32" if measured.float_layers is None else "int8",
        "max_difference": measured.largest,
        "relative_difference": measured.relative,
        "images": measured.images,
    }
    if measured.images:
        record |= {
            metric: measured.accuracy,
            f"checkpoint_{metric}": measured.model_accuracy,
            "agreement": measured.agreement,
            "max_probability_difference": measured.probability,
        }
    record |= {"ms_per_image": dict(measured.ms)}
    if measured.float_layers is not None:
        record |= {
            "float32_ms_per_image": dict(measured.float_ms),
            "float_layers": measured.float_layers,
        }
    return record if commit is None else record | {"commit": commit}


def _line(name: str, one: "Export", commit: str | None) -> str:
    measured, metric = one.measured, METRICS[one.metric]
    size = in_bytes(one.bytes)
    if measured.float_layers is not None:
        size += f" of 8 bits, {how_many(len(measured.float_layers), 'layer')} in float32"
    largest = measured.largest
    same = f"logits differ by {largest:.1e} at most" if largest else "logits are the same"
    if measured.images:
        on = (
            f"{metric} {measured.accuracy:.2%} on {measured.images} validation images, the "
            f"checkpoint's {measured.model_accuracy:.2%}; the same answer for "
            f"{measured.agreement:.2%}, probabilities differ by {measured.probability:.2g} at most"
        )
    else:
        on = "on noise; no validation data at hand"
    times = _times(measured.ms)
    if measured.float_ms:
        times += f"; in float32 {_times(measured.float_ms)}"
    end = "" if commit is None else f"; {commit}"
    return f"{name}: {size}; {same}; {on}; an image takes {times}{end}"


def _times(ms: "Times") -> str:
    return ", ".join(f"{each:.3g} ms" + f" in a batch of {n}" * (n > 1) for n, each in ms)
