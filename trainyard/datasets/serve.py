"""Serves a data set over HTTP by nginx in the foreground, with a configuration of its own.

The configuration holds no path or text of the user's, since nginx's language cannot escape all of
them. The folder and the TLS files are links in the server's temporary folder.
"""

import base64
import hashlib
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainyard.data import formats
from trainyard.data.index.splits import all_splits
from trainyard.data.storage.location import ResolvedLocation, expand_braces, find_place
from trainyard.errors import DataError, TrainyardError
from trainyard.parent import signal_without_parent

_SEARCH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
_START_S = 10
_HEAD_S = 10  # for a client to send the whole head of a request, or to agree on TLS
_CONNECTIONS = 1 << 14  # of each worker, with 7 MB; a rank may have 256
_FILES = 64  # of each worker, besides a socket and a file for each connection

_CONFIGURATION = """\
daemon off;
{user}worker_processes auto;
worker_rlimit_nofile {files};
pid nginx.pid;
error_log stderr error;
events {{ worker_connections {connections}; }}
http {{
    types {{ application/x-tar tar; application/json json; }}
    default_type application/octet-stream;
    access_log off;
    log_not_found off;
    server_tokens off;
    sendfile on;
    keepalive_requests 1000000;
    client_header_timeout {head_s}s;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    server {{
        listen {address}:{port}{tls};
        root root;
        disable_symlinks on from=$document_root;
        autoindex {listing};
{blocks}\
        if ($request_method !~ ^(GET|HEAD)$) {{ return 405; }}
        location ~ /\\. {{ return 404; }}
    }}
}}
"""
_LOGIN = """\
        auth_basic "trainyard";
        auth_basic_user_file users;
"""
_TLS = """\
        ssl_certificate certificate.pem;
        ssl_certificate_key key.pem;
"""


@dataclass(frozen=True)
class ServerOptions:
    folder: Path
    host: str = "127.0.0.1"
    port: int = 8765
    listing: bool = False
    logins: tuple[str, ...] = ()
    """NAME:PASSWORD each; if there are any, a login is required."""
    certificate: Path | None = None
    key: Path | None = None

    @property
    def url(self) -> str:
        scheme = "https" if self.certificate else "http"
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        host = f"[{host}]" if ":" in host else host
        login = "NAME:PASSWORD@" if self.logins else ""
        return f"{scheme}://{login}{host}:{self.port}"


def check_options(options: ServerOptions) -> None:
    """DataError for options that nginx would refuse or misinterpret."""
    if not options.folder.is_dir():
        raise DataError(f"{options.folder}: no such folder")
    if not 1 <= options.port <= 65535:
        raise DataError(f"--port {options.port}: a port is a number from 1 to 65535")
    if not re.fullmatch(r"[A-Za-z0-9.:-]+", options.host):
        raise DataError(f"--host {options.host!r} is neither an address nor a name")
    if bool(options.certificate) != bool(options.key):
        raise DataError("TLS needs both --certificate and --key")
    for path in filter(None, (options.certificate, options.key)):
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    for login in options.logins:
        name, colon, password = login.partition(":")
        if not (name and colon and password) or not login.isprintable():
            raise DataError("a login is NAME:PASSWORD in one line of printable characters")


def published(folder: Path) -> dict[str, str]:
    """The location of each split relative to the folder, as a user of the URL writes it."""
    found = {}
    for split, location in all_splits(str(folder)).items():
        place = find_place(location)
        if formats.recognise(place) == "folder":
            raise DataError(
                f"{location}: a folder of single images is not read over HTTP; make shards of it "
                "with trainyard data pack"
            )
        if place.can_gain:
            location = place.path(_brace_list(place, formats.scan(place).watched))
        for name in find_place(location).names:
            _check_reachable(folder, Path(place.path(name)))
        found[split] = os.path.relpath(location, folder)
    return found


def _brace_list(place: ResolvedLocation, watched: tuple[str, ...]) -> str:
    """The watched files as a brace list, `x-{000000..001281}.tar`, by the first and last name."""
    names = sorted(name for name in watched if os.path.isfile(place.path(name)))
    first, last = names[0], names[-1]
    candidates = [first]
    for digits in re.finditer(r"\d+", first):
        start, end = digits.span()
        end_of_last = len(last) - len(first) + end
        candidates.append(f"{first[:start]}{{{digits[0]}..{last[start:end_of_last]}}}{first[end:]}")
    for candidate in candidates:
        with suppress(DataError):  # too many names
            if expand_braces(candidate) == names:
                return candidate
    raise DataError(
        f"{place.location}: the names of its files do not count up from one to the next, so no URL "
        "can list them; trainyard data pack writes files that do, and a list of them"
    )


def _check_reachable(folder: Path, path: Path) -> None:
    inside = Path(os.path.relpath(path, folder))
    if ".." in inside.parts:
        raise DataError(f"{path}: lies outside of {folder}")
    for part in (inside, *inside.parents):
        if str(part) != "." and (folder / part).is_symlink():
            raise DataError(f"{folder / part}: is a symbolic link; links are not served")


def configuration(options: ServerOptions) -> str:
    """The configuration of nginx; its file names are relative to the temporary folder."""
    files, (_, limit) = 2 * _CONNECTIONS + _FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    files = files if limit == resource.RLIM_INFINITY else min(files, limit)
    return _CONFIGURATION.format(
        files=files,
        connections=(files - _FILES) // 2,
        head_s=_HEAD_S,
        # Workers of a root master run as nobody, who may not read private data.
        user="user root;\n" if os.geteuid() == 0 else "",
        address=f"[{options.host}]" if ":" in options.host else options.host,
        port=options.port,
        tls=" ssl" if options.certificate else "",
        listing="on" if options.listing else "off",
        blocks=(_TLS if options.certificate else "") + (_LOGIN if options.logins else ""),
    )


@contextmanager
def serving(options: ServerOptions) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs nginx until the end of the block, then stops it and deletes its temporary folder."""
    program = _find_nginx()
    _check_port(options)
    with tempfile.TemporaryDirectory(prefix="trainyard-serve-") as folder:
        prefix = Path(folder)
        _fill(prefix, options)
        command = [*program, "-p", f"{prefix}/", "-c", "nginx.conf"]
        _check(command)
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process, which then ends nginx
            preexec_fn=_die_with_parent,
        )
        try:
            _wait_until_it_answers(server, options)
            yield server
        finally:
            server.terminate()
            server.wait()


def _fill(prefix: Path, options: ServerOptions) -> None:
    (prefix / "nginx.conf").write_text(configuration(options))
    (prefix / "root").symlink_to(options.folder.resolve())
    if options.certificate and options.key:
        (prefix / "certificate.pem").symlink_to(options.certificate.resolve())
        (prefix / "key.pem").symlink_to(options.key.resolve())
    if options.logins:
        (prefix / "users").touch(mode=0o600)
        (prefix / "users").write_text("".join(map(_user_line, options.logins)))


def _user_line(login: str) -> str:
    """A line of nginx's auth_basic_user_file: salted SHA-1, the safest hash without crypt."""
    name, _, password = login.partition(":")
    salt = secrets.token_bytes(8)
    digest = hashlib.sha1(password.encode() + salt).digest()
    return f"{name}:{{SSHA}}{base64.b64encode(digest + salt).decode()}\n"


def _find_nginx() -> list[str]:
    path = shutil.which("nginx", path=_SEARCH)
    if path is None:
        raise DataError("nginx is not installed: apt-get install nginx-light, or the like")
    said = subprocess.run([path, "-v"], capture_output=True, text=True).stderr
    version = tuple(map(int, re.findall(r"\d+", said)[:3]))
    # Older versions only warn that they cannot write to the system's log.
    return [path, "-e", "stderr"] if version >= (1, 19, 5) else [path]


def _check_port(options: ServerOptions) -> None:
    """DataError if the server cannot listen at this host and port."""
    where = f"--host {options.host} --port {options.port}"
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((options.host, options.port))
            probe.listen()
    except PermissionError:
        raise DataError(f"{where}: ports below 1024 are for root; choose a higher one") from None
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise DataError(f"{where}: {why}; choose another host or port") from None


def _check(command: list[str]) -> None:
    """DataError with nginx's own message if it rejects its input, say a broken key."""
    test = subprocess.run([*command, "-t", "-q"], capture_output=True, text=True)
    if test.returncode:
        words = re.findall(r"\[emerg\] (?:\d+#\d+: )?(.*)", test.stderr) or [test.stderr.strip()]
        raise DataError(f"nginx cannot start: {words[0]}")


def _wait_until_it_answers(server: "subprocess.Popen[bytes]", options: ServerOptions) -> None:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    deadline = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((host, options.port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.01)
    raise TrainyardError("nginx did not answer; its output is above")


def _die_with_parent() -> None:
    """In the child: ends it with its parent, even if the parent is killed."""
    signal_without_parent(signal.SIGTERM)
