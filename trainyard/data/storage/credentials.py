"""Logins and signatures of URLs, kept in the memory of this process and out of file names.

Names of files are written into recipes, indices, run directories and messages. `take_secrets` in
location.py therefore separates a location from its secrets when it is read, and `with_secrets`
adds them again for a request. The secrets of a query are the parameters of signatures, by a list of
names; all others belong to the name of the file.
"""

import os
import re
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from trainyard.errors import DataError

TOKENS = "TRAINYARD_TOKENS"
"""The environment variable of bearer tokens: HOST=TOKEN, separated by spaces."""
_HUB, _HUB_ENDPOINT, _HUB_TOKEN = "https://huggingface.co", "HF_ENDPOINT", "HF_TOKEN"
PIPE = "pipe:"  # before a shell command

# In a text. A password may wrongly hold a /, but is no less secret; `host:80/a@b` has no login.
_ADDRESS = r"\[[\da-fA-F:.]+\](?::\d+)?/"  # of IPv6
_LOGIN = re.compile(rf"://(?:[^/\s\"<>]*|(?!{_ADDRESS})[^/\s\"<>:@]+:(?!\d+/)[^\s\"<>@]*)@")
_END = r"[:;,.)'\]]*(?:[\s\"<>#]|$)"  # of a URL in a sentence
_QUERY = re.compile(rf"(?<=://)([^\s\"<>?#]*)\?(?!{_END})([^\s\"<>#]*?)(?={_END})")
# In a text that is a single URL.
_LOGIN_OF_URL = re.compile(rf"://(?:[^/?#]*|(?!{_ADDRESS})[^/?#:@]+:(?!\d+/)[^@]*)@")
_QUERY_OF_URL = re.compile(r"\?([^#]*)")
_ENDS_URL = re.compile(r"[\s\"'<>]")  # the end of a URL in a text
# Names of secret parameters: of S3, Google, Aliyun, Tencent, Akamai and CloudFront.
_SIGNATURE = re.compile(
    r"x-(?:amz|goog|oss|ms|cos)-.+|sig|signature|(?:aws|oss)accesskeyid|googleaccessid"
    r"|key-pair-id|security-token|hdn\w+",
    re.IGNORECASE,
)
# Secret beside a signature: those of Azure, and dates and policies of others.
_BESIDE_SIGNATURE = re.compile(
    r"s[verpts]|srt|spr|sip|sdd|ses|scid|s[aud]{1,2}oid|sk(?:oid|tid|[tesv])|exp|expires|policy",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"[\w-]*token", re.IGNORECASE)
_SIGNS = re.compile(r"(?:^|&)(?:[\w-]+-)?sig(?:nature)?=", re.IGNORECASE)
# Parameters that belong to no signature, and look too secret for a name.
_SUSPICIOUS = re.compile(
    r"(?:[\w-]+[_-])?(?:pass|passwd|password|passphrase|pwd|pw|secret|auth|authorization|api-?key"
    r"|access-?key|secret-?key|credentials?|hmac|session|sessionid|jwt|bearer)(?:[_-]\w+)?"
    r"|\w*(?:api_key|access_key|secret_key|password|secret)\w*",
    re.IGNORECASE,
)
_KEY = re.compile(r"(?:[\w-]+[_-])?key=[\w+=%-]{16,}", re.IGNORECASE)  # not the name of a file


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
    """A text to show to users: its URLs have no login and no secret parameters."""
    return _QUERY.sub(lambda found: found[1] + _public(found[2]), _LOGIN.sub("://", text))


def public_name(location: str) -> str:
    """The public name of a URL or a `pipe:` command."""
    if location.startswith(PIPE):
        return without_secrets(location)
    name = _LOGIN_OF_URL.sub("://", location, count=1)
    return _QUERY_OF_URL.sub(lambda found: _public(found[1]), name)


def _public(query: str) -> str:
    """The public parameters of a query, after a question mark; "" if there are none."""
    shown = [pair for pair in query.split("&") if pair and not _is_secret(pair, query)]
    return "?" + "&".join(shown) if shown else ""


def _is_secret(pair: str, query: str) -> bool:
    name = unquote(pair.partition("=")[0])
    beside = _BESIDE_SIGNATURE.fullmatch(name) and _SIGNS.search(query)
    return bool(
        _SIGNATURE.fullmatch(name) or _TOKEN.fullmatch(name) or beside or _is_suspicious(pair)
    )


def _is_suspicious(pair: str) -> bool:
    name = unquote(pair.partition("=")[0])
    return bool(_SUSPICIOUS.fullmatch(name) or _KEY.fullmatch(pair))


def check_url(url: str) -> None:
    """DataError for a URL whose secrets cannot be told from its name.

    It has a parameter that looks secret and is of no signature, or a space, say: in a text its end
    would be ambiguous.
    """
    if url.startswith(PIPE):
        return
    if _LOGIN_OF_URL.sub("", url) != url or "?" in url:
        if _ENDS_URL.search(url):
            raise DataError(
                f"{url.partition('://')[0]}://…: a URL with a login or a query, which holds a "
                "space, a quote, < or >: write a space as %20, ' as %27, \" as %22, < as %3C and "
                "> as %3E"
            )
        query = _QUERY_OF_URL.search(_LOGIN_OF_URL.sub("://", url, count=1))
        for pair in query[1].split("&") if query else ():
            if _is_suspicious(pair):
                raise DataError(
                    f"{public_name(url)}: its parameter {pair.partition('=')[0]} looks like a "
                    "secret, and the names of files are written down: use a login in ~/.netrc, or "
                    f"a token in {TOKENS}"
                )


def keep(name: str, given: str) -> None:
    """Stores the secrets of `given`, a URL or a command, under its public `name`.

    DataError for an invalid URL, and for a second token of one name: it may be of another file. A
    signature may be renewed.
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
    path = name.partition("?")[0].rstrip("/")
    if login:
        for place in (path, path.rpartition("/")[0], _server(path)):
            _known.logins[place] = login
    if _public(parts.query) != f"?{parts.query}" and parts.query:
        name = name.rstrip("/")
        before = _known.queries.get(name, parts.query)
        if _tokens(before) != _tokens(parts.query):
            raise DataError(
                f"{name}: two URLs differ only in a token, which is a secret and not part of the "
                "name: each file needs a name of its own"
            )
        _known.queries[name] = parts.query


def with_secrets(name: str) -> str:
    """The URL or command to request: with its own secrets, or with those of a folder above it."""
    if name.startswith(PIPE):
        return _known.commands.get(name, name)
    path, mark, query = name.partition("?")
    places = _above(path)
    login = next((_known.logins[place] for place in places if place in _known.logins), "")
    for place in [name.rstrip("/")] if mark else places:
        if place in _known.queries:
            query = _known.queries[place]
            break
    scheme, separator, rest = path.partition("://")
    if login and "@" not in rest.partition("/")[0]:
        rest = f"{login}@{rest}"
    return f"{scheme}{separator}{rest}" + (f"?{query}" if query else mark)


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


def _tokens(query: str) -> list[str]:
    """The parameters whose values may stand for a file: tokens that belong to no signature."""
    pairs = {pair: unquote(pair.partition("=")[0]) for pair in query.split("&")}
    found = [pair for pair, name in pairs.items() if _TOKEN.fullmatch(name)]
    return sorted(pair for pair in found if not _SIGNATURE.fullmatch(pairs[pair]))
