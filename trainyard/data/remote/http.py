"""Files behind HTTP and HTTPS, read by byte ranges over connections that are used again.

A server that goes away for a while is waited for (`patience.py`), and a transfer that breaks goes
on at the byte where it broke. A file that has changed on the server, or is gone, ends the run.
Of a URL's user name and password, or those in ~/.netrc, no message tells.
"""

import netrc
import os
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import HTTPError

from trainyard.data.remote.patience import Patience, Transient
from trainyard.data.source import Stamp, without_login
from trainyard.errors import DataError

_TIMEOUT = urllib3.Timeout(connect=10, read=60)  # seconds; read: between two packets
_ONLY_REDIRECTS = urllib3.Retry(total=None, connect=0, read=0, redirect=5, status=0, other=0)
_CONNECTIONS = 64  # kept open per server, enough for a loader's threads
_PIECE = 8 << 20  # bytes taken from a connection at once; smaller ones cost a third of the speed
_MAX_WITHOUT_RANGES = 16 << 20  # bytes of a file that is worth fetching whole for each part
# Headers of a tar are many small reads close together: what follows one comes with it.
_SMALL = 4096  # bytes
_MIN_WINDOW, _MAX_WINDOW = 8 << 10, 256 << 10  # bytes; grows while reads go on where it ends
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


class HttpFile:
    """A file on a web server. OSError if it is not there; safe to read from many threads."""

    def __init__(self, url: str) -> None:
        parts = _split(url)
        self._url = self.name = without_login(url)
        self._server = parts.netloc.rpartition("@")[2]
        self._headers = _headers(parts)
        self._proxy = _proxy_of(parts)
        self._window = (0, b"")  # where it starts, and the bytes read ahead
        self.size, self._validator, self._has_ranges = self._look()
        self.stamp: Stamp = [self._validator, self.size]

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise OSError(f"{self.name} is cut short or has changed since it was indexed")
        if size <= _SMALL or not self._has_ranges:
            return self._read_ahead(offset, size)
        return self._fetch(offset, size)

    def close(self) -> None:
        """Nothing is held: connections belong to the process."""

    def _read_ahead(self, offset: int, size: int) -> bytes:
        start, content = self._window  # taken at once: other threads replace it
        if not start <= offset <= offset + size <= start + len(content):
            is_next = 0 <= offset - start - len(content) <= len(content)
            length = (
                min(max(2 * len(content), _MIN_WINDOW), _MAX_WINDOW) if is_next else _MIN_WINDOW
            )
            start, length = (offset, length) if self._has_ranges else (0, self.size)
            content = self._fetch(start, min(length, self.size - start))
            self._window = start, content
        return content[offset - start : offset - start + size]

    def _look(self) -> tuple[int, str, bool]:
        """The size, the server's tag for this version of the file, and whether ranges work.

        One byte is asked for rather than the head, which signed URLs refuse.
        """
        patience = Patience(self.name, self._server)
        while True:
            try:
                response = self._send(0, 0)
            except Transient as failure:
                patience.wait(failure)
                continue
            with response:
                size = response.headers.get("Content-Length")
                has_ranges = response.status != 200
                if has_ranges:
                    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
                    size = found[3] if found else None
                    response.drain_conn()
            if size is None:
                raise DataError(f"{self.name}: the server does not tell its size")
            return int(size), _validator(response), has_ranges

    def _fetch(self, offset: int, size: int) -> bytes:
        """Bytes from the server, however often it breaks off within the time that is allowed."""
        patience = Patience(self.name, self._server)
        parts: list[bytes] = []
        while size:
            try:
                for part in self._stream(offset, size):
                    parts.append(part)
                    offset, size = offset + len(part), size - len(part)
                    patience.reset()
            except (FileNotFoundError, PermissionError) as error:
                raise DataError(f"{error}; it could be read a while ago") from None
            except Transient as failure:
                patience.wait(failure)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _stream(self, offset: int, size: int) -> Iterator[bytes]:
        with self._send(offset, offset + size - 1) as response:
            self._check(response, offset, size)
            skip = offset if response.status == 200 else 0
            while skip or size:
                try:
                    # Without an exception at an early end: what has come is worth keeping.
                    part = response.read(min(skip or size, _PIECE))
                except HTTPError as error:
                    raise Transient(_reason(error)) from None
                if not part:
                    raise Transient("the transfer broke off")
                if skip:
                    skip -= len(part)
                else:
                    size -= len(part)
                    yield part
            if response.status == 206:
                response.drain_conn()  # hands the connection back; nothing is left to drain

    def _send(self, first: int, last: int) -> urllib3.BaseHTTPResponse:
        """The server's answer to a request for bytes: status 200, 206, or 416 for an empty file."""
        try:
            response = _pool(os.getpid(), self._proxy).request(
                "GET",
                self._url,
                headers=self._headers | {"Range": f"bytes={first}-{last}"},
                preload_content=False,
                decode_content=False,
                enforce_content_length=False,
                retries=_ONLY_REDIRECTS,
                timeout=_TIMEOUT,
            )
        except HTTPError as error:
            raise _failure(self.name, error) from None
        content_range = response.headers.get("Content-Range", "")
        if response.status in (200, 206) or (response.status == 416 and "*/0" in content_range):
            return response
        response.close()
        raise self._refusal(response)

    def _refusal(self, response: urllib3.BaseHTTPResponse) -> Exception:
        answer = f"{self.name}: the server answers {response.status} {response.reason}".rstrip()
        match response.status:
            case 404 | 410:
                return FileNotFoundError(answer)
            case 403:
                return PermissionError(answer)
            case 401 if "Authorization" in self._headers:
                return DataError(f"{answer}: the user name or the password is wrong")
            case 401:
                return DataError(
                    f"{answer}: it wants a user name and a password; put them into ~/.netrc or "
                    "write them into the URL, as in http://NAME:PASSWORD@HOST/"
                )
            case 408 | 425 | 429 | 500 | 502 | 503 | 504:
                pause = response.headers.get("Retry-After", "")
                pause_s = min(float(pause), 60) if pause.isdecimal() else 0
                return Transient(answer.removeprefix(f"{self.name}: "), pause_s)
            case 416:
                return DataError(_changed(self.name))
        return DataError(answer)

    def _check(self, response: urllib3.BaseHTTPResponse, offset: int, size: int) -> None:
        """DataError unless an answer brings these bytes of the file that was opened."""
        if response.status == 200:
            if self.size > _MAX_WITHOUT_RANGES:
                raise DataError(
                    f"{self.name}: its server cannot send parts of a file (it ignores Range); use "
                    "one that can, such as nginx: trainyard data serve"
                )
            total = response.headers.get("Content-Length", "")
        else:
            found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None or (found[1], found[2]) != (str(offset), str(offset + size - 1)):
                raise DataError(f"{self.name}: the server sends another part than was asked for")
            total = found[3]
        if [_validator(response), int(total or -1)] != self.stamp:
            raise DataError(_changed(self.name))


def _changed(name: str) -> str:
    return f"{name} has changed on the server while it was in use; index it anew and start again"


def _validator(response: urllib3.BaseHTTPResponse) -> str:
    """What a server changes when the file does; empty if it tells nothing."""
    return response.headers.get("ETag") or response.headers.get("Last-Modified") or ""


# --- what failed, and whether trying again can help ---


def _failure(name: str, error: HTTPError) -> Exception:
    cause = _root_of(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return DataError(
            f"{name}: its certificate is not trusted ({cause.verify_message}); SSL_CERT_FILE "
            "names a file of certificates to trust"
        )
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
        return DataError(f"{name}: there is no such host")
    if isinstance(cause, urllib3.exceptions.LocationValueError):
        return DataError(f"{name}: not a valid URL ({cause})")
    if isinstance(cause, urllib3.exceptions.ResponseError):
        return DataError(f"{name}: {cause}")
    return Transient(_reason(error))


def _reason(error: HTTPError) -> str:
    cause = _root_of(error)
    if isinstance(cause, (TimeoutError, urllib3.exceptions.TimeoutError)):
        return "no answer in time"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.lower()
    return str(cause) or type(cause).__name__


def _root_of(error: BaseException) -> BaseException:
    """The error at the bottom of urllib3's wrappers."""
    inner = [getattr(error, "reason", None), error.__cause__, *reversed(error.args)]
    for candidate in inner:
        if isinstance(candidate, Exception) and candidate is not error:
            return _root_of(candidate)
    return error


# --- connections and credentials ---


@cache
def _pool(pid: int, proxy: str | None) -> urllib3.PoolManager:
    """The connections of this process: a forked one must not share its parent's."""
    if proxy is None:
        return urllib3.PoolManager(maxsize=_CONNECTIONS)
    parts = urlsplit(proxy)
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    headers = urllib3.make_headers(proxy_basic_auth=login)
    return urllib3.ProxyManager(proxy, maxsize=_CONNECTIONS, proxy_headers=headers)


def _proxy_of(parts: SplitResult) -> str | None:
    """The proxy that the environment names for a server."""
    proxy = getproxies().get(parts.scheme)
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _headers(parts: SplitResult) -> dict[str, str]:
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    else:
        login = _login_in_netrc(parts.hostname or "") or ""
    headers = {"Accept-Encoding": "identity", "User-Agent": "trainyard"}
    if login:
        headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
    return headers


@cache
def _login_in_netrc(host: str) -> str | None:
    try:
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    return f"{found[0]}:{found[2]}" if found else None


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError if it is no number
    except ValueError as error:
        raise DataError(f"{without_login(url)}: not a valid URL ({error})") from None
    if not parts.hostname:
        raise DataError(f"{without_login(url)}: not a valid URL (it names no host)")
    return parts
