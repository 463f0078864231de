"""`trainyard data serve`: serves a data set to other machines over HTTP."""

import argparse
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.errors import DataError, TrainyardError

if TYPE_CHECKING:
    from trainyard.datasets.serve import ServerOptions


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard data serve` to its parser."""
    parser.add_argument("folder", metavar="DIR", help="the folder that holds the data set")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--list", action="store_true", help="show folders to browsers")
    login = parser.add_mutually_exclusive_group()
    login.add_argument("--user", metavar="NAME:PASSWORD", help="require this login")
    login.add_argument("--password-file", metavar="FILE", help="file with lines NAME:PASSWORD")
    parser.add_argument("--certificate", metavar="FILE", help="TLS certificate with its chain, PEM")
    parser.add_argument("--key", metavar="FILE", help="TLS key, PEM")
    parser.add_argument("--dry-run", action="store_true", help="only print nginx's configuration")
    parser.set_defaults(run_command=data_serve)


def data_serve(options: argparse.Namespace) -> int:
    """Run `trainyard data serve`. Returns the exit code."""
    from trainyard.datasets.serve import check_options, configuration, published, serving

    server_options = _server_options(options)
    check_options(server_options)
    if options.dry_run:
        print(configuration(server_options), end="")
        return 0
    locations = published(server_options.folder)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with serving(server_options) as server:
            print(f"{server_options.url}/ serves {server_options.folder}; Ctrl-C ends it")
            print(_command(server_options, locations), flush=True)
            code = server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)
    raise TrainyardError(f"nginx ended unexpectedly (exit code {code})")


def _server_options(options: argparse.Namespace) -> "ServerOptions":
    from trainyard.datasets.serve import ServerOptions

    logins = [options.user] if options.user is not None else []
    if options.password_file:
        try:
            logins = Path(options.password_file).read_text().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{options.password_file}: cannot be read ({error})") from None
        logins = [line for line in logins if line.strip()]
        if not logins:
            raise DataError(f"{options.password_file}: has no line NAME:PASSWORD")
    return ServerOptions(
        folder=Path(options.folder),
        host=options.host,
        port=options.port,
        listing=options.list,
        logins=tuple(logins),
        certificate=Path(options.certificate) if options.certificate else None,
        key=Path(options.key) if options.key else None,
    )


def _command(options: "ServerOptions", locations: dict[str, str]) -> str:
    """The command that trains from the served data."""
    from urllib.parse import quote

    from trainyard.data.storage.manifest import FILE_NAME

    if (options.folder / FILE_NAME).is_file():
        words = ["--data", options.url]
    else:
        words = []
        for split, location in locations.items():
            key = "--data.val" if split == "val" else "--data.train"
            words += [key, f"{options.url}/{quote(location, safe='/{}#.')}"]
    return f"trainyard train RECIPE {shlex.join(words)}"
