"""Requests to web servers: connections, credentials, and the failures worth a retry.

The user name and password of a URL, or those in ~/.netrc, tokens and the query appear in no
message. They are sent to the server of the URL only, and not to one that it redirects to.
"""

import netrc
import os
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import HTTPError

from trainyard.data.storage.credentials import public_name, token_of, with_secrets, without_secrets
from trainyard.data.storage.hub import web_url
from trainyard.data.storage.remote import connections
from trainyard.data.storage.remote.deadline import TooSlow, bounded
from trainyard.data.storage.remote.retry import Refused, Transient
from trainyard.errors import DataError

CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d{1,18})")
_TIMEOUT = urllib3.Timeout(connect=10, read=60)  # seconds; read: between two packets, see deadline
_MOST_REDIRECTS = 5
_ONLY_REDIRECTS = urllib3.Retry(
    total=None, connect=0, read=0, redirect=_MOST_REDIRECTS, status=0, other=0
)
_REDIRECTS = (301, 302, 303, 307, 308)
# By the Hub's header X-Error-Code.
_HUB_ERRORS = {
    "GatedRepo": "a gated data set, whose terms must be accepted on its page",
    "RepoNotFound": "no such data set, or a private one",
}
_CONNECTIONS = 64  # kept open by urllib3 per server


class Response(Protocol):
    """An answer; closing it early drops its connection."""

    @property
    def status(self) -> int: ...

    @property
    def reason(self) -> str | None: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Resource:
    """A file behind a URL. Raises OSError, DataError, or Transient if a retry may help."""

    def __init__(self, url: str) -> None:
        requested = web_url(url)
        parts = _split(with_secrets(requested))
        self.name = public_name(url)
        address = public_name(requested).partition("?")[0]
        self._url = f"{address}?{parts.query}" if parts.query else address
        self.server = parts.netloc.rpartition("@")[2]
        self._headers = _headers(parts)
        self._proxy = _proxy_of(parts)
        self._moved_to: str | None = None  # the URL that sent the last range

    def get(self, span: str | None) -> urllib3.BaseHTTPResponse:
        """The answer to a request for the whole file, or for a `span` such as "bytes=0-99".

        The status is 200, 206, or 416 for an empty file.
        """
        response = self._by_urllib3(self._headers | ({"Range": span} if span else {}))
        self._check(response)
        return response

    def get_range(self, first: int, last: int) -> Response:
        """Like `get`, for bytes `first` to `last`; needs less CPU where there is no proxy."""
        headers = self._headers | {"Range": f"bytes={first}-{last}"}
        try:
            response: Response = self._directly(headers)
        except connections.NotPlain:
            response = self._by_urllib3(headers)
        self._check(response)
        return response

    def _directly(self, headers: dict[str, str]) -> connections.RawResponse:
        """The answer without urllib3. NotPlain if urllib3 must handle the request."""
        if self._proxy is not None:
            raise connections.NotPlain("a proxy")
        if self._moved_to is not None:
            answer = self._ask(self._moved_to, headers)
            if answer.status in (200, 206):
                return answer
            answer.close()  # perhaps an expired signature
            self._moved_to = None
        url = self._url
        for _ in range(_MOST_REDIRECTS + 1):
            answer = self._ask(url, headers)
            if answer.status not in _REDIRECTS:
                self._moved_to = None if url == self._url else url
                return answer
            try:
                with answer:
                    url = urljoin(url, answer.headers.get("Location"))
            except ValueError:
                raise Refused(self._misled()) from None
        raise Refused(f"{self.name}: too many redirects")

    def _ask(self, url: str, headers: dict[str, str]) -> connections.RawResponse:
        if _server_of(url) != _server_of(self._url):  # another server must not get the login
            headers = {name: headers[name] for name in headers if name != "Authorization"}
        try:
            return connections.ask(url, headers)
        except OSError as error:
            raise _failure(self.name, error) from None

    def _by_urllib3(self, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        try:
            return _pool(os.getpid(), self._proxy).request(
                "GET",
                self._url,
                headers=headers,
                preload_content=False,
                decode_content=False,
                enforce_content_length=False,
                retries=_ONLY_REDIRECTS,
                timeout=_TIMEOUT,
            )
        except HTTPError as error:
            raise _failure(self.name, error) from None
        except ValueError:
            raise Refused(self._misled()) from None

    def _misled(self) -> str:
        return f"{self.name}: the server redirects to an address that is no URL"

    def _check(self, response: Response) -> None:
        content_range = response.headers.get("Content-Range", "")
        if response.status in (200, 206) or (response.status == 416 and "*/0" in content_range):
            return
        response.close()
        raise self._refusal(response)

    def _refusal(self, response: Response) -> Exception:
        answer = f"{self.name}: the server answers {response.status} {response.reason}".rstrip()
        match response.status:
            case 401 | 403 if response.headers.get("X-Error-Code", "") in _HUB_ERRORS:
                return Refused(self._refusal_of_hub(response.headers.get("X-Error-Code", "")))
            case 404 | 410:
                return FileNotFoundError(answer)
            case 403:
                return PermissionError(
                    f"{answer}: a login or a signature is missing, wrong or expired, or the file "
                    "is not there"
                )
            case 401 if self._headers.get("Authorization", "").startswith("Bearer"):
                return Refused(f"{answer}: the token is wrong, expired or not for this file")
            case 401 if "Authorization" in self._headers:
                return Refused(f"{answer}: the user name or the password is wrong")
            case 401:
                return Refused(
                    f"{answer}: it wants a user name and a password; put them into ~/.netrc or "
                    "write them into the URL, as in http://NAME:PASSWORD@HOST/, each time (a run "
                    "directory keeps none); a token goes into HF_TOKEN or TRAINYARD_TOKENS"
                )
            case 408 | 425 | 429 | 500 | 502 | 503 | 504:
                pause = response.headers.get("Retry-After", "")
                pause_s = min(float(pause), 60) if pause.isdecimal() else 0
                return Transient(answer.removeprefix(f"{self.name}: "), pause_s)
            case 416:
                return DataError(changed(self.name))
        return Refused(answer)

    def _refusal_of_hub(self, code: str) -> str:
        if "Authorization" not in self._headers:
            remedy = "set HF_TOKEN to a token of an account that has access"
        else:
            remedy = "the account of HF_TOKEN has no access, or the token is wrong or expired"
        return f"{self.name}: {_HUB_ERRORS[code]}: {remedy}"


def changed(name: str) -> str:
    """The message that a remote file changed while it was in use."""
    return (
        f"{name} has changed on the server while it was in use: start again, and it is indexed anew"
    )


def validator(response: Response) -> str:
    """A server's tag of the version of a file; empty if it sends none."""
    return response.headers.get("ETag") or response.headers.get("Last-Modified") or ""


def _server_of(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


# --- failures, and whether a retry can help ---


def _failure(name: str, error: HTTPError | OSError) -> Exception:
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
    return Transient(reason_of(error))


def reason_of(error: HTTPError | OSError) -> str:
    """One line about a failed request, without secrets."""
    cause = _root_of(error)
    if isinstance(cause, TooSlow):
        return str(cause)
    if isinstance(cause, (TimeoutError, urllib3.exceptions.TimeoutError)):
        return "no answer in time"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.lower()
    return str(cause) or type(cause).__name__


def _root_of(error: BaseException) -> BaseException:
    """The innermost error inside urllib3's wrappers."""
    inner = [getattr(error, "reason", None), error.__cause__, *reversed(error.args)]
    for candidate in inner:
        if isinstance(candidate, Exception) and candidate is not error:
            return _root_of(candidate)
    return error


# --- connections and credentials ---


@cache
def _pool(pid: int, proxy: str | None) -> urllib3.PoolManager:
    """The connections of this process, which a forked process must not share."""
    if proxy is None:
        return bounded(urllib3.PoolManager(maxsize=_CONNECTIONS))
    parts = urlsplit(proxy)
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    headers = urllib3.make_headers(proxy_basic_auth=login)
    return bounded(urllib3.ProxyManager(proxy, maxsize=_CONNECTIONS, proxy_headers=headers))


def _proxy_of(parts: SplitResult) -> str | None:
    """The environment's proxy for a server; None if there is none."""
    proxy = getproxies().get(parts.scheme)
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _headers(parts: SplitResult) -> dict[str, str]:
    headers = {"Accept-Encoding": "identity", "User-Agent": "trainyard"}
    authorization = _authorization(parts)
    if authorization:
        headers["Authorization"] = authorization
    return headers


def _authorization(parts: SplitResult) -> str | None:
    """The header's value: by the URL's login, else a token, else the login in ~/.netrc."""
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return f"Basic {b64encode(login.encode()).decode()}"
    token = token_of(parts)
    if token:
        return f"Bearer {token}"
    found = _login_in_netrc(parts.hostname or "")
    return f"Basic {b64encode(found.encode()).decode()}" if found else None


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
        why = f" ({error})" if without_secrets(url) == url else ""  # the error may quote a password
        raise DataError(f"{without_secrets(url)}: not a valid URL{why}") from None
    if not parts.hostname:
        raise DataError(f"{without_secrets(url)}: not a valid URL (it names no host)")
    return parts
