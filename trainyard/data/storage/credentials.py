"""Logins and signatures of URLs, kept in the memory of this process and out of file names.

Names of files are written into recipes, indices, run directories and messages. `take_secrets` in
location.py therefore separates a location from its secrets when it is read, and `with_secrets`
adds them again for a request. The path of a URL names the file; its query counts as a signature.
"""

import os
import re
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from trainyard.errors import DataError

TOKENS = "TRAINYARD_TOKENS"
"""The environment variable of bearer tokens: HOST=TOKEN, separated by spaces."""
_HUB, _HUB_ENDPOINT, _HUB_TOKEN = "https://huggingface.co", "HF_ENDPOINT", "HF_TOKEN"
PIPE = "pipe:"  # before a shell command

# In a text. A password may wrongly hold a /, but is no less secret; `host:80/a@b` has no login.
_ADDRESS = r"\[[\da-fA-F:.]+\](?::\d+)?/"  # of IPv6
_LOGIN = re.compile(rf"://(?:[^/\s\"<>]*|(?!{_ADDRESS})[^/\s\"<>:@]+:(?!\d+/)[^\s\"<>@]*)@")
_END = r"[:;,.)'\]]*(?:[\s\"<>#]|$)"  # of a URL in a sentence
_QUERY = re.compile(rf"(?<=://)([^\s\"<>?#]*)\?(?!{_END})[^\s\"<>#]*?(?={_END})")
# In a text that is a single URL.
_LOGIN_OF_URL = re.compile(rf"://(?:[^/?#]*|(?!{_ADDRESS})[^/?#:@]+:(?!\d+/)[^@]*)@")
_QUERY_OF_URL = re.compile(r"\?[^#]*")
_ENDS_URL = re.compile(r"[\s\"'<>]")  # the end of a URL in a text
# Query parameters of signatures: of S3, Google, Azure and CloudFront, and common names.
_SIGNING = (
    r"(?:x-(?:amz|goog|oss|ms|cos)-[\w-]+|s[a-z]{1,2}|sk[a-z]{1,3}|spr|hdn\w+|exp|expires|policy"
    r"|[\w-]*(?:sig|token|secret|pass|pwd|auth|key|cred|hmac|session|jwt)[\w-]*)"
)
_SIGNED = re.compile(rf"(?<=[?&]){_SIGNING}=[^&\s'\"]*&?", re.IGNORECASE)


class Credentials(NamedTuple):
    """The secrets that requests need; plain data, to pass to other processes of Trainyard."""

    logins: dict[str, str]
    """`NAME:PASSWORD`, as in a URL, by the URL of a file, a folder or a server."""
    queries: dict[str, str]
    """Queries by the URL of a file or a folder."""
    commands: dict[str, str]
    """Complete shell commands by their public names."""


_known = Credentials({}, {}, {})


def known() -> Credentials:
    """The credentials of this process, to pass to a process that reads data for it."""
    return _known


def adopt(given: Credentials) -> None:
    """Adds the credentials of another process."""
    for mine, others in zip(_known, given, strict=True):
        mine.update(others)


def without_secrets(text: str) -> str:
    """A text to show to users: its URLs have no login and no query."""
    return _QUERY.sub(r"\1", _LOGIN.sub("://", text))


def without_signature(text: str) -> str:
    """A text without the logins of its URLs and without common parameters of signatures."""
    return _SIGNED.sub("", _LOGIN.sub("://", text))


def public_name(location: str) -> str:
    """The public name of a URL or a `pipe:` command; a command keeps its URLs' other parameters."""
    if location.startswith(PIPE):
        return without_signature(location)
    return _QUERY_OF_URL.sub("", _LOGIN_OF_URL.sub("://", location, count=1))


def check_url(url: str) -> None:
    """DataError for a URL with secrets and, say, a space: in a text its end would be ambiguous."""
    if not url.startswith(PIPE) and public_name(url) != url and _ENDS_URL.search(url):
        raise DataError(
            f"{url.partition('://')[0]}://…: a URL with a login or a query, which holds a space, a "
            "quote, < or >: write a space as %20, ' as %27, \" as %22, < as %3C and > as %3E"
        )


def keep(name: str, given: str) -> None:
    """Stores the secrets of `given`, a URL or a command, under its public `name`.

    DataError if two URLs with the same path have queries that differ in more than a signature, and
    for an invalid URL.
    """
    if name.startswith(PIPE):
        _known.commands[name] = given
        return
    try:
        parts = urlsplit(given)
    except ValueError:  # its message may quote the password
        raise DataError(f"{name}: not a valid URL") from None
    login, mark, _ = parts.netloc.rpartition("@")
    if not mark and _LOGIN_OF_URL.search(given):
        raise DataError(f"{name}: in a password, write / as %2F, ? as %3F and # as %23")
    name = name.rstrip("/")
    if login:
        for place in (name, name.rpartition("/")[0], _server(name)):
            _known.logins[place] = login
    if parts.query:
        before = _known.queries.get(name, parts.query)
        if _meaning(before) != _meaning(parts.query):
            raise DataError(
                f"{name}: two URLs differ only in their queries, which are treated as secrets and "
                "not stored: each file needs its own path"
            )
        _known.queries[name] = parts.query


def with_secrets(name: str) -> str:
    """The URL or command to request: with its own secrets, or with those of a folder above it."""
    if name.startswith(PIPE):
        return _known.commands.get(name, name)
    scheme, mark, rest = name.partition("://")
    places = _above(name)
    login = next((_known.logins[place] for place in places if place in _known.logins), "")
    query = next((_known.queries[place] for place in places if place in _known.queries), "")
    if login and "@" not in rest.partition("/")[0]:
        rest = f"{login}@{rest}"
    return f"{scheme}{mark}{rest}" + (f"?{query}" if query and "?" not in rest else "")


def hub_endpoint() -> str:
    """The URL of the Hugging Face Hub, or of the server that $HF_ENDPOINT names instead."""
    return (os.environ.get(_HUB_ENDPOINT) or _HUB).rstrip("/")


def token_of(url: SplitResult) -> str | None:
    """The environment's bearer token for the server of a URL; None if there is none.

    DataError if $TRAINYARD_TOKENS is malformed; its message does not quote the token.
    """
    found = None
    if f"{url.scheme}://{url.netloc}".lower() in (_HUB, hub_endpoint().lower()):
        found = os.environ.get(_HUB_TOKEN)
    for item in os.environ.get(TOKENS, "").split():
        server, equals, token = item.partition("=")
        if not (server and equals and token):
            raise DataError(f"{TOKENS} is malformed: write HOST=TOKEN or HOST:PORT=TOKEN, several "
                            "with spaces between them")  # fmt: skip
        if server.lower() in (url.netloc.lower(), f"{url.scheme}://{url.netloc}".lower()):
            found = token
    if found and not (found.isascii() and found.isprintable() and " " not in found):
        raise DataError(f"the token for {url.netloc} has a character that tokens cannot have")
    return found or None


def _above(url: str) -> list[str]:
    """A URL, the folders above it and its server."""
    server = _server(url)
    places = [url.rstrip("/")]
    while len(places[-1]) > len(server):
        places.append(places[-1].rpartition("/")[0])
    return places


def _server(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return scheme + mark + rest.partition("/")[0]


def _meaning(query: str) -> list[tuple[str, str]]:
    """The parameters of a query that belong to no signature: a signature may be renewed."""
    pairs = parse_qsl(query, keep_blank_values=True)
    return sorted(pair for pair in pairs if not re.fullmatch(_SIGNING, pair[0], re.IGNORECASE))
