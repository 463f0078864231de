"""`trainyard data serve`: serves a data set to other machines over HTTP."""

import argparse
import signal
from pathlib import Path
from urllib.parse import urlsplit

from trainyard.errors import DataError, TrainyardError
from trainyard.parent import put_back_handlers


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard data serve` to its parser."""
    add = parser.add_argument
    add("folder", metavar="DIR", help="the folder that holds the data set")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all")
    add("--port", type=int, default=8765)
    add("--user", metavar="NAME:PASSWORD", help="require this login")
    add("--certificate", metavar="FILE", help="TLS certificate with its chain, PEM")
    add("--key", metavar="FILE", help="TLS key, PEM")
    add("--dry-run", action="store_true", help="only print nginx's configuration")
    parser.set_defaults(run_command=data_serve)


def data_serve(options: argparse.Namespace) -> int:
    """Run `trainyard data serve`. Returns the exit code."""
    from trainyard.data.storage.manifest import read_manifest
    from trainyard.datasets.serve import ServerOptions, check_options, configuration, serving

    server_options = ServerOptions(
        folder=Path(options.folder),
        host=options.host,
        port=options.port,
        login=options.user,
        certificate=Path(options.certificate) if options.certificate else None,
        key=Path(options.key) if options.key else None,
    )
    check_options(server_options)
    if options.dry_run:
        print(configuration(server_options), end="")
        return 0
    manifest = read_manifest(options.folder)
    if manifest is not None and manifest.format == "folder":
        raise DataError(
            "serve.single-images",
            "{path}: single images are not read over HTTP; pack them",
            path=options.folder,
        )
    url = server_options.url
    data = url if manifest else f"'{url}/NAME-{{000000..000099}}.tar'"
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with serving(server_options) as server:
            print(f"{url}/ serves {options.folder}; Ctrl-C ends it")
            if options.user:
                host = urlsplit(url).hostname
                print(f"in ~/.netrc of each node: machine {host} login NAME password PASSWORD")
            print(f"trainyard train RECIPE --data {data}", flush=True)
            code = server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        put_back_handlers({signal.SIGTERM: before})
    raise TrainyardError(
        "serve.nginx-ended", "nginx ended unexpectedly (exit code {exit_code})", exit_code=code
    )
