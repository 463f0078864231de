"""`trainyard report`: one or several runs as one HTML file that needs no network."""

import argparse
import json
import signal
from pathlib import Path

from trainyard.errors import InputError
from trainyard.files import check_run

_PORT = 8766


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard report` to its parser."""
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="run directories; several are overlaid"
    )
    parser.add_argument(
        "--out",
        metavar="FILE.html",
        help="default: report.html in the run directory, or in this folder for several runs",
    )
    parser.add_argument("--json", action="store_true", help="print its path as JSON")
    live = parser.add_argument_group("while training goes on")
    live.add_argument(
        "--watch",
        action="store_true",
        help="serve it to browsers on this machine, updated every few seconds",
    )
    live.add_argument("--port", metavar="N", type=int, help=f"default: {_PORT}; 0: any free port")
    parser.epilog = (
        "Runs that differ only in run.seed are shown as their mean with two standard deviations. "
        "From another machine: ssh -L 8766:127.0.0.1:8766 HOST."
    )
    parser.set_defaults(run_command=report)


def report(options: argparse.Namespace) -> int:
    """Run `trainyard report`. Returns the exit code."""
    folders = [Path(run) for run in options.runs]
    for folder in folders:
        check_run(folder)  # before imports that take a second
    if options.watch:
        if options.out or options.json:
            raise InputError("--watch writes no file: leave --out and --json away, or --watch")
        return _serve(folders, _PORT if options.port is None else options.port)
    if options.port is not None:
        raise InputError("--port is for --watch: add it")
    if options.out and Path(options.out).suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out {options.out}: name a file that ends in .html")
    from trainyard.report.page import write_report

    path = write_report(folders, Path(options.out) if options.out else None)
    size = path.stat().st_size
    if options.json:
        print(json.dumps({"report": str(path), "bytes": size, "runs": options.runs}))
    else:
        print(f"{path} ({size / 1e6:.1f} MB): open it in a browser")
    return 0


def _serve(folders: list[Path], port: int) -> int:
    from trainyard.report.serve import server_of

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with server_of(folders, port) as server:
            print(f"http://127.0.0.1:{server.server_address[1]}/; Ctrl-C ends it", flush=True)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0
