"""Serves a data set over HTTP by nginx in the foreground, with a configuration of its own.

The configuration holds no path or text of the user's, since nginx's language cannot escape all of
them. The folder is a link in the server's temporary folder; the TLS files are copied there.
"""

import base64
import hashlib
import os
import pwd
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.errors import DataError, TrainyardError
from trainyard.parent import signal_without_parent

_START_S = 10
_CONNECTIONS = 1 << 14  # of each worker, with 7 MB; a rank may have 256
_FILES = 64  # of each worker, besides a socket and a file for each connection

_CONFIGURATION = """\
daemon off;
worker_processes auto;
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
    login: str | None = None
    """NAME:PASSWORD that clients must give."""
    certificate: Path | None = None
    key: Path | None = None
    head_s: int = 10
    """Seconds for a client to send the whole head of a request, or to agree on TLS."""

    @property
    def url(self) -> str:
        """The URL for clients, without a login, which is in their ~/.netrc."""
        scheme = "https" if self.certificate else "http"
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        host = f"[{host}]" if ":" in host else host
        return f"{scheme}://{host}:{self.port}"


def check_options(options: ServerOptions) -> None:
    """DataError for options that nginx would misinterpret."""
    if not options.folder.is_dir():
        raise DataError("serve.no-such-folder", "{path}: no such folder", path=options.folder)
    if not re.fullmatch(r"[A-Za-z0-9.:-]+", options.host):
        raise DataError(
            "serve.malformed-host",
            "--host {value!r} is neither an address nor a name",
            value=options.host,
        )
    if bool(options.certificate) != bool(options.key):
        raise DataError("serve.incomplete-tls", "TLS needs both --certificate and --key")
    for path in filter(None, (options.certificate, options.key)):
        if not path.is_file():
            raise DataError("serve.no-such-file", "{path}: no such file", path=path)
    name, _, password = (options.login or "NAME:PASSWORD").partition(":")
    if not (name and password) or not f"{name}{password}".isprintable():
        raise DataError("serve.malformed-login", "--user is NAME:PASSWORD, of printable characters")


def configuration(options: ServerOptions) -> str:
    """The configuration of nginx; its file names are relative to the temporary folder."""
    files, (_, limit) = 2 * _CONNECTIONS + _FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    files = files if limit == resource.RLIM_INFINITY else min(files, limit)
    return _CONFIGURATION.format(
        files=files,
        connections=(files - _FILES) // 2,
        head_s=options.head_s,
        address=f"[{options.host}]" if ":" in options.host else options.host,
        port=options.port,
        tls=" ssl" if options.certificate else "",
        blocks=(_TLS if options.certificate else "") + (_LOGIN if options.login else ""),
    )


@contextmanager
def serving(options: ServerOptions) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs nginx until the end of the block, then stops it and deletes its temporary folder."""
    _check_port(options)
    with tempfile.TemporaryDirectory(prefix="trainyard-serve-") as folder:
        account = _account(options.folder)
        _fill(Path(folder), options, account)
        command = [*_nginx(), "-p", f"{folder}/", "-c", "nginx.conf"]
        test = subprocess.run([*command, "-t", "-q"], capture_output=True, text=True, **account)
        if test.returncode:
            words = re.findall(r"\[emerg\] (?:\d+#\d+: )?(.*)", test.stderr)
            raise DataError(
                "serve.nginx-failed",
                "nginx cannot start: {reason}",
                reason=(words or [test.stderr.strip()])[0],
            )
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process, which then ends nginx
            # It ends with this process, even if that is killed.
            preexec_fn=lambda: signal_without_parent(signal.SIGTERM),
            **account,
        )
        try:
            _wait_until_it_answers(server, options)
            yield server
        finally:
            server.terminate()
            server.wait()


def _check_port(options: ServerOptions) -> None:
    """DataError if the server cannot listen at this host and port."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        socket.create_server((options.host, options.port), family=family).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DataError(
            "serve.cannot-listen",
            "--host {host} --port {port}: {reason}",
            host=options.host,
            port=options.port,
            reason=why,
        ) from None


def _account(folder: Path) -> dict[str, Any]:
    """Root runs nginx as the owner of the data, or as nobody: it is on a network."""
    if os.geteuid() != 0:
        return {}
    owner = folder.stat().st_uid
    entry = pwd.getpwuid(owner) if owner else pwd.getpwnam("nobody")
    account: dict[str, Any] = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    if subprocess.run(["test", "-x", folder], **account).returncode:
        raise DataError(
            "serve.folder-closed",
            "{path}: cannot be read by {user}, who runs nginx for root: be another user, or let "
            "others read it",
            path=folder,
            user=entry.pw_name,
        )
    return account


def _fill(prefix: Path, options: ServerOptions, account: dict[str, Any]) -> None:
    (prefix / "nginx.conf").write_text(configuration(options))
    (prefix / "root").symlink_to(options.folder.resolve())
    for name, path in (("certificate.pem", options.certificate), ("key.pem", options.key)):
        if path is not None:  # a copy, since root's own file is not for whom nginx runs as
            (prefix / name).touch(mode=0o600)
            (prefix / name).write_bytes(path.read_bytes())
    if options.login:
        (prefix / "users").touch(mode=0o600)
        (prefix / "users").write_text(_user_line(options.login))
    for path in (prefix, *prefix.iterdir()) if account else ():
        os.chown(path, account["user"], account["group"], follow_symlinks=False)


def _user_line(login: str) -> str:
    """A line of nginx's auth_basic_user_file: salted SHA-1, the safest hash without crypt."""
    name, _, password = login.partition(":")
    salt = secrets.token_bytes(8)
    digest = hashlib.sha1(password.encode() + salt).digest()
    return f"{name}:{{SSHA}}{base64.b64encode(digest + salt).decode()}\n"


def find_nginx() -> str | None:
    """The path of nginx, whose folder is not on the PATH of every user."""
    folders = os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"
    return shutil.which("nginx", path=os.pathsep.join(folders))


def _nginx() -> list[str]:
    path = find_nginx()
    if path is None:
        raise DataError(
            "serve.needs-nginx", "nginx is not installed: apt-get install nginx-light, or the like"
        )
    printed = subprocess.run([path, "-v"], capture_output=True, text=True).stderr
    version = tuple(map(int, re.findall(r"\d+", printed)[:3]))
    # Older versions only warn that they cannot write to the system's log.
    return [path, "-e", "stderr"] if version >= (1, 19, 5) else [path]


def _wait_until_it_answers(server: "subprocess.Popen[bytes]", options: ServerOptions) -> None:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    deadline = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((host, options.port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.01)
    raise TrainyardError("serve.nginx-silent", "nginx did not answer; its output is above")
