"""`trainyard report`: one or several runs as one HTML file that needs no network."""

import argparse
import json
from pathlib import Path

from trainyard.cli.options import add_json, check_suffix, loading
from trainyard.files import check_run
from trainyard.printable import print_line, printable


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard report` to its parser."""
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", help="run directories; several are overlaid")
    add(
        "--out",
        metavar="FILE.html",
        help="default: report.html in the run directory, or in this folder for several runs",
    )
    add(
        "--suspects",
        metavar="FILE.csv",
        help="also show images that may have a wrong label: suspects.csv of evaluate --out",
    )
    add(
        "--cam",
        action="store_true",
        help="also show where the model finds the class that it takes an image for (Grad-CAM)",
    )
    add(
        "--png",
        action="store_true",
        help="also write curves.png, confusion.png, worst.png and batch.png, the first batch as "
        "training sees it, beside the report; FILE-curves.png, ... beside FILE.html",
    )
    add_json(parser)
    parser.epilog = (
        "Runs that differ only in run.seed or data.val_fold are shown as their mean with two "
        "standard deviations. A report may be made while its run trains; trackers (watch.wandb, "
        "watch.tensorboard, ...) show that live."
    )
    parser.set_defaults(run_command=report)


def report(options: argparse.Namespace) -> int:
    """Run `trainyard report`. Returns the exit code."""
    folders = [Path(run) for run in options.runs]
    for folder in folders:
        check_run(folder)  # before imports that take a second
    check_suffix(options.out, "--out", ".html", ".htm")
    from trainyard.report.page import write_report

    suspects = Path(options.suspects) if options.suspects else None
    out = Path(options.out) if options.out else None
    path = write_report(folders, out, suspects=suspects, cam=options.cam)
    size = path.stat().st_size
    pictures = _write_pictures(folders, path) if options.png else []
    if options.json:
        told = {"report": str(path), "bytes": size, "runs": options.runs}
        print(json.dumps(told | ({"pictures": pictures} if options.png else {})))
    else:
        print(printable(f"{path} ({size / 1e6:.1f} MB): open it in a browser"))
        for picture in pictures:
            print(printable(picture))
    return 0


def _write_pictures(folders: list[Path], page: Path) -> list[str]:
    """The pictures that are written; why there is none of the others is printed."""
    with loading():
        from trainyard.report.images import write_images

    written = write_images(folders, page)
    for path, reason in written.items():
        if reason:
            print_line(f"no {path.name}: {reason}")
    return [str(path) for path, reason in written.items() if not reason]
