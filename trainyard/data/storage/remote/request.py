"""GET requests to web servers: credentials, redirects, and the failures worth a retry.

Tokens, the login in ~/.netrc and signatures appear in no message. They are sent to the server of
the URL only, and not to one that it redirects to.
"""

import asyncio
import netrc
import os
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from trainyard.data.storage.credentials import public_name, token_of, with_secrets, without_secrets
from trainyard.data.storage.hub import web_url
from trainyard.data.storage.remote.client import client_of
from trainyard.data.storage.remote.retry import Refused, Transient
from trainyard.errors import DataError

GRACE_S, FLOOR = 60.0, 10_000  # seconds for any part of an answer; bytes for another second
CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d{1,18})", re.ASCII)
_SIZE = re.compile(r"\d{1,18}", re.ASCII)  # bytes, in 64 bits
_MOST_REDIRECTS = 5
_UNRESERVED = "%/:=&?~#+!$,;'@()*[]"  # characters of a URL that are sent as they are


class Resource:
    """A file behind a URL. Raises OSError, DataError, or Transient if a retry may help."""

    def __init__(self, url: str) -> None:
        self.name = public_name(url)
        parts = _split(with_secrets(web_url(url)))
        self.server = parts.netloc
        url = parts.geturl()
        # Percent-encoded characters stay as they are: a signature covers them.
        self._url = URL(quote(url, safe=_UNRESERVED), encoded=True) if url.isascii() else URL(url)
        self._authorization = _authorization(parts)
        self._proxy = _proxy_of(parts)
        self._moved_to: URL | None = None  # the address that sent the last range

    @asynccontextmanager
    async def get(self, span: str | None) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a request for the whole file, or for a `span` such as "bytes=0-99".

        The status is 200, 206, or 416 for an empty file. Errors inside the block are those of the
        transfer.
        """
        headers = {} if span is None else {"Range": span}
        try:
            async with client_of(asyncio.get_running_loop()) as session:
                async with transfer_timeout(0):  # however many interim answers there are
                    response = await self._answer(session, headers)
                async with response:
                    self._check(response)
                    yield response
        except (FileNotFoundError, PermissionError):
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise _failure(self.name, error) from None

    async def _answer(
        self, session: aiohttp.ClientSession, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        """The answer, after redirects; the next request goes to where they led."""
        if self._moved_to is not None:
            response = await session.get(self._moved_to, headers=headers, proxy=self._proxy)
            if response.status in (200, 206):
                return response
            response.close()  # perhaps an expired signature
            self._moved_to = None
        if self._authorization:  # aiohttp sends it to no server that it is redirected to
            headers = headers | {"Authorization": self._authorization}
        response = await session.get(
            self._url, headers=headers, proxy=self._proxy, max_redirects=_MOST_REDIRECTS
        )
        if response.history and response.url.origin() != self._url.origin():
            self._moved_to = response.url
        return response

    def _check(self, response: aiohttp.ClientResponse) -> None:
        content_range = response.headers.get("Content-Range", "")
        if response.status in (200, 206) or (response.status == 416 and "*/0" in content_range):
            return
        raise self._refusal(response)

    def _refusal(self, response: aiohttp.ClientResponse) -> Exception:
        status = f"{response.status} {response.reason or ''}".rstrip()
        refused = partial(Refused, url=self.name, status=status)
        answer = f"{self.name}: the server answers {status}"
        match response.status:
            case 401 | 403 if response.headers.get("X-Error-Code") == "GatedRepo":
                return Refused("hub.gated", url=self.name)
            case 404 | 410:
                return FileNotFoundError(answer)
            case 403:
                return PermissionError(
                    f"{answer}: a login or a signature is missing, wrong or expired, or the file "
                    "is not there"
                )
            case 401 if (self._authorization or "").startswith("Bearer"):
                return refused(
                    "storage.token-refused",
                    "{url}: the server answers {status}: the token is wrong, expired or not for "
                    "this file",
                )
            case 401 if self._authorization:
                return refused(
                    "storage.login-refused",
                    "{url}: the server answers {status}: the user name or the password is wrong",
                )
            case 401:
                return refused(
                    "storage.no-login",
                    "{url}: the server answers {status}: it wants a user name and a password; put "
                    "them into ~/.netrc; a token goes into HF_TOKEN or TRAINYARD_TOKENS",
                )
            case 408 | 425 | 429 | 500 | 502 | 503 | 504:
                pause = response.headers.get("Retry-After", "")
                pause_s = min(float(pause), 60) if pause.isdecimal() else 0
                return Transient(f"the server answers {status}", pause_s)
            case 416:
                return DataError("storage.changed-while-read", url=self.name)
        return refused("storage.refused", "{url}: the server answers {status}")


def transfer_timeout(size: int) -> asyncio.Timeout:
    """Ends a block that receives `size` bytes too slowly, or a head, with a TimeoutError."""
    return asyncio.timeout(GRACE_S + size / FLOOR)


def validator(response: aiohttp.ClientResponse) -> str:
    """A server's tag of the version of a file; empty if it sends none."""
    return response.headers.get("ETag") or response.headers.get("Last-Modified") or ""


def total_size(response: aiohttp.ClientResponse) -> int | None:
    """The size of the whole file in bytes; None if an answer does not state it."""
    text = response.headers.get("Content-Length", "")
    if response.status != 200:
        content_range = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        text = content_range[3] if content_range else ""
    return int(text) if _SIZE.fullmatch(text) else None


# --- failures, and whether a retry can help ---


def _failure(name: str, error: aiohttp.ClientError | OSError) -> Exception:
    cause = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    match error, cause:
        case _, ssl.SSLCertVerificationError():
            return DataError(
                "storage.untrusted-certificate",
                "{url}: its certificate is not trusted ({reason}); SSL_CERT_FILE names a file of "
                "certificates to trust",
                url=name,
                reason=cause.verify_message,
            )
        case _, socket.gaierror(errno=socket.EAI_NONAME):
            return DataError("storage.unknown-host", "{url}: there is no such host", url=name)
        case aiohttp.TooManyRedirects(), _:
            return Refused("storage.too-many-redirects", "{url}: too many redirects", url=name)
        case aiohttp.RedirectClientError(), _:
            return Refused(
                "storage.redirect-to-no-url",
                "{url}: the server redirects to an address that is no URL",
                url=name,
            )
        case aiohttp.InvalidURL(), _:
            return DataError("storage.invalid-url", url=name, reason="it cannot be requested")
    return Transient(_reason(error, cause))


def _reason(error: aiohttp.ClientError | OSError, cause: Exception) -> str:
    """One line about a failed request, without secrets."""
    match error, cause:
        case _, TimeoutError():
            return "no answer in time"
        case _, OSError(errno=int(number)) if number > 0:
            return os.strerror(number).lower()
        case aiohttp.ClientPayloadError(), _:
            return "the transfer was interrupted"
        case aiohttp.ServerDisconnectedError(), _:
            return "the server closed the connection"
        case aiohttp.ClientResponseError(), _:  # its text has the URL
            return f"a malformed answer ({error.message.partition(chr(10))[0]})"
    return " ".join(str(cause).split()) or type(cause).__name__


# --- addresses and credentials ---


def _proxy_of(parts: SplitResult) -> str | None:
    """The environment's proxy for a server; None if there is none."""
    proxy = getproxies().get(parts.scheme)
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _authorization(parts: SplitResult) -> str | None:
    """The header's value: by a token, else by the login in ~/.netrc."""
    token = token_of(parts)
    if token:
        return f"Bearer {token}"
    return _login_in_netrc(parts.hostname or "")


@cache
def _login_in_netrc(host: str) -> str | None:
    try:
        account = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    login = f"{account[0]}:{account[2]}" if account else ""
    return f"Basic {b64encode(login.encode()).decode()}" if login else None


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError if it is no number
    except ValueError as error:
        raise DataError(
            "storage.invalid-url", url=without_secrets(url), reason=str(error)
        ) from None
    if not parts.hostname:
        raise DataError("storage.invalid-url", url=without_secrets(url), reason="it names no host")
    return parts
