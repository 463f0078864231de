"""Logins and signatures of URLs, kept in the memory of this process and out of every name.

Names of files are written into recipes, indices, run directories and messages. So a location is
parted from its secrets where it comes in (`take_secrets` in location.py), and a request puts them
back (`with_secrets`). The path of a URL names the file; its query is taken for a signature.
"""

import os
import re
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from trainyard.errors import DataError

TOKENS = "TRAINYARD_TOKENS"
"""The environment variable of bearer tokens: HOST=TOKEN, several with spaces between them."""
_HUB, _HUB_TOKEN = "huggingface.co", "HF_TOKEN"
PIPE = "pipe:"  # before a shell command

# In a text. With a / too, which is wrong in a password but no less secret; `host:80/a@b` is none.
_ADDRESS = r"\[[\da-fA-F:.]+\](?::\d+)?/"  # of IPv6
_LOGIN = re.compile(rf"://(?:[^/\s\"<>]*|(?!{_ADDRESS})[^/\s\"<>:@]+:(?!\d+/)[^\s\"<>@]*)@")
_END = r"[:;,.)'\]]*(?:[\s\"<>#]|$)"  # of a URL in a sentence
_QUERY = re.compile(rf"(?<=://)([^\s\"<>?#]*)\?(?!{_END})[^\s\"<>#]*?(?={_END})")
# In a text that is one URL.
_LOGIN_OF_URL = re.compile(rf"://(?:[^/?#]*|(?!{_ADDRESS})[^/?#:@]+:(?!\d+/)[^@]*)@")
_QUERY_OF_URL = re.compile(r"\?[^#]*")
_ENDS_URL = re.compile(r"[\s\"'<>]")  # where it stands in a text
# Parameters of signatures: of S3, Google, Azure, CloudFront, and by their usual names.
_SIGNING = (
    r"(?:x-(?:amz|goog|oss|ms|cos)-[\w-]+|s[a-z]{1,2}|sk[a-z]{1,3}|spr|hdn\w+|exp|expires|policy"
    r"|[\w-]*(?:sig|token|secret|pass|pwd|auth|key|cred|hmac|session|jwt)[\w-]*)"
)
_SIGNED = re.compile(rf"(?<=[?&]){_SIGNING}=[^&\s'\"]*&?", re.IGNORECASE)


class Credentials(NamedTuple):
    """What requests need beside the names of files; plain data for other processes of ours."""

    logins: dict[str, str]
    """`NAME:PASSWORD`, as in a URL, by the URL of a file, a folder or a server."""
    queries: dict[str, str]
    """By the URL of a file or a folder."""
    commands: dict[str, str]
    """Shell commands by their names."""


_known = Credentials({}, {}, {})


def known() -> Credentials:
    """All that this process has been given, to be handed to a process that reads for it."""
    return _known


def adopt(given: Credentials) -> None:
    """Take over what another process has been given."""
    for mine, others in zip(_known, given, strict=True):
        mine.update(others)


def without_secrets(text: str) -> str:
    """A text as people may see it: its URLs without login and query, a command without both."""
    return _QUERY.sub(r"\1", _LOGIN.sub("://", text))


def without_signature(text: str) -> str:
    """A text without the logins of its URLs and without the usual parameters of signatures."""
    return _SIGNED.sub("", _LOGIN.sub("://", text))


def public_name(location: str) -> str:
    """The name of a URL, or of a `pipe:` command, of whose queries other parameters stay."""
    if location.startswith(PIPE):
        return without_signature(location)
    return _QUERY_OF_URL.sub("", _LOGIN_OF_URL.sub("://", location, count=1))


def check_url(url: str) -> None:
    """DataError for a secret with a space in it, say: in a text one would not see where it ends."""
    if not url.startswith(PIPE) and public_name(url) != url and _ENDS_URL.search(url):
        raise DataError(
            f"{url.partition('://')[0]}://…: a URL with a login or a query, which holds a space, a "
            "quote, < or >: write a space as %20, ' as %27, \" as %22, < as %3C and > as %3E"
        )


def keep(name: str, given: str) -> None:
    """Remember what a URL or a command was given with.

    DataError if two URLs with one path have queries that name different things, and for what is no
    URL.
    """
    if name.startswith(PIPE):
        _known.commands[name] = given
        return
    try:
        parts = urlsplit(given)
    except ValueError:  # which may quote the password
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
                f"{name}: two URLs differ in nothing but their queries, which are taken for "
                "signatures and written nowhere: each file needs a path of its own"
            )
        _known.queries[name] = parts.query


def with_secrets(name: str) -> str:
    """What to ask for: the URL or the command with what it, or a folder above it, came with."""
    if name.startswith(PIPE):
        return _known.commands.get(name, name)
    scheme, mark, rest = name.partition("://")
    places = _above(name)
    login = next((_known.logins[place] for place in places if place in _known.logins), "")
    query = next((_known.queries[place] for place in places if place in _known.queries), "")
    if login and "@" not in rest.partition("/")[0]:
        rest = f"{login}@{rest}"
    return f"{scheme}{mark}{rest}" + (f"?{query}" if query and "?" not in rest else "")


def token_of(url: SplitResult) -> str | None:
    """The bearer token that the environment has for the server of a URL, and for no other.

    DataError, which does not quote it, if $TRAINYARD_TOKENS is malformed.
    """
    found = None
    if url.scheme == "https" and url.netloc.lower() == _HUB:
        found = os.environ.get(_HUB_TOKEN)
    for item in os.environ.get(TOKENS, "").split():
        server, equals, token = item.partition("=")
        if not (server and equals and token):
            raise DataError(f"{TOKENS} is malformed: write HOST=TOKEN or HOST:PORT=TOKEN, several "
                            "with spaces between them")  # fmt: skip
        if server.lower() in (url.netloc.lower(), f"{url.scheme}://{url.netloc}".lower()):
            found = token
    if found and not (found.isascii() and found.isprintable() and " " not in found):
        raise DataError(f"the token for {url.netloc} has a character that no token has")
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
    """The parameters of a query that are of no signature, which may be a newer one."""
    pairs = parse_qsl(query, keep_blank_values=True)
    return sorted(pair for pair in pairs if not re.fullmatch(_SIGNING, pair[0], re.IGNORECASE))
