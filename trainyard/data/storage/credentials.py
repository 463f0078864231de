"""Signatures of URLs, kept in the memory of this process and out of file names, and bearer tokens.

Names of files are written into recipes, indices, run directories and messages. `take_secrets` in
location.py therefore separates a URL from its signature when it is read, and `with_secrets` adds it
again for a request. Parameters of signatures are known by a list of names; all others belong to the
name of the file. Logins do not belong into URLs at all.
"""

import os
import re
from urllib.parse import SplitResult, unquote, urlsplit

from trainyard.errors import DataError

TOKENS = "TRAINYARD_TOKENS"
"""The environment variable of bearer tokens: HOST=TOKEN, separated by spaces."""
_HUB, _HUB_ENDPOINT = "https://huggingface.co", "HF_ENDPOINT"
PIPE = "pipe:"  # before a shell command

_URL = re.compile(r"(?<=://)[^\s\"'<>]*[^\s\"'<>:;,.?)\]]")  # in a text, without its scheme
_LOGIN = re.compile(r"^[^/?#]*@")  # in a URL without its scheme
_ENDS_URL = re.compile(r"[\s\"'<>]")
# Names of parameters: of the signatures of S3, Google, Aliyun, Tencent, Akamai and CloudFront.
_SIGNATURE = re.compile(
    r"x-(?:amz|goog|oss|ms|cos)-.+|sig|signature|(?:aws|oss)accesskeyid|googleaccessid"
    r"|key-pair-id|security-token|hdn\w+"
)
_SIGNS = re.compile(r"(?:[\w-]+-)?sig(?:nature)?")  # the signature itself
# Of a signature beside one that signs (those of Azure, and dates and policies of others), else not.
_BESIDE_SIGNATURE = re.compile(
    r"s[verpts]|srt|spr|sip|sdd|ses|scid|s[aud]{1,2}oid|sk(?:oid|tid|[tesv])|exp|expires|policy"
)
_SECRET = re.compile(
    r"(?:[\w-]+[_-])?(?:token|pass|passwd|password|passphrase|pwd|pw|secret|auth|authorization"
    r"|(?:api|access|secret)[_-]?key|credentials?|hmac|session|sessionid|jwt|bearer)(?:[_-]\w+)?"
)
_KEY = re.compile(r"(?:[\w-]+[_-])?key=[\w+=%-]{16,}", re.IGNORECASE)  # not the name of a file

Credentials = dict[str, str]
"""Queries by the URL of a file or a folder, and complete shell commands by their public names."""

_known: Credentials = {}


def known() -> Credentials:
    """The credentials of this process, to pass to a process that reads data for it."""
    return _known


def adopt(given: Credentials) -> None:
    """Adds the credentials of another process."""
    _known.update(given)


def without_secrets(text: str) -> str:
    """A text to show to users: its URLs have no login and no secret parameters."""
    return _URL.sub(lambda match: _public(_LOGIN.sub("", match[0])), text)


def public_name(location: str) -> str:
    """The public name of a URL or a `pipe:` command."""
    return without_secrets(location) if location.startswith(PIPE) else _public(location)


def _public(url: str) -> str:
    """A URL without its secret parameters."""
    bare, mark, fragment = url.partition("#")
    path, _, query = bare.partition("?")
    pairs = [pair for pair in query.split("&") if pair]
    is_signed = any(_SIGNS.fullmatch(_name_of(pair)) for pair in pairs)
    shown = [pair for pair in pairs if not _is_hidden(pair, is_signed)]
    return path + ("?" + "&".join(shown) if shown else "") + mark + fragment


def _name_of(pair: str) -> str:
    return unquote(pair.partition("=")[0]).lower()


def _is_hidden(pair: str, is_signed: bool) -> bool:
    name = _name_of(pair)
    is_beside = is_signed and _BESIDE_SIGNATURE.fullmatch(name)
    return bool(is_beside or _SIGNATURE.fullmatch(name) or _is_secret(pair))


def _is_secret(pair: str) -> bool:
    """True for a parameter that looks secret, and is of no signature."""
    name = _name_of(pair)
    looks_secret = _SECRET.fullmatch(name) or _KEY.fullmatch(pair)
    return bool(looks_secret) and not _SIGNATURE.fullmatch(name)


def check_url(url: str) -> None:
    """DataError for a URL with a login, or with a parameter that looks secret.

    Its message shows neither.
    """
    if url.startswith(PIPE):
        return
    scheme, _, rest = url.partition("://")
    if _LOGIN.match(rest):
        raise DataError(
            "storage.login-in-url",
            "{scheme}://…: a URL with a login: put it into ~/.netrc, as in machine HOST login "
            "NAME password PASSWORD, and leave it out here",
            scheme=scheme,
        )
    try:
        _ = urlsplit(url).port
    except ValueError:  # perhaps a login with a / in the password
        raise DataError(
            "storage.invalid-url", url=f"{scheme}://…", reason="no host with a number as its port"
        ) from None
    query = rest.partition("?")[2]
    if query and _ENDS_URL.search(url):
        raise DataError(
            "storage.unquoted-query",
            "{scheme}://…: a URL with a query, which holds a space, a quote, < or >: write a "
            "space as %20, ' as %27, \" as %22, < as %3C and > as %3E",
            scheme=scheme,
        )
    for pair in query.partition("#")[0].split("&"):
        if _is_secret(pair):
            raise DataError(
                "storage.secret-in-url",
                "{url}: its parameter {name} looks like a secret, and the names of files are "
                "written down: use a login in ~/.netrc, or a token in TRAINYARD_TOKENS",
                url=public_name(url),
                name=pair.partition("=")[0],
            )


def keep(name: str, given: str) -> None:
    """Stores the signature of `given`, a URL or a command, under its public `name`.

    A newer signature takes the place of an older one.
    """
    is_command = name.startswith(PIPE)
    _known[name if is_command else name.rstrip("/")] = (
        given if is_command else given.partition("?")[2]
    )


def with_secrets(name: str) -> str:
    """The URL or command to request: with its own signature, or with that of a folder above it."""
    if name.startswith(PIPE):
        return _known.get(name, name)
    path, mark, _ = name.partition("?")
    prefixes = [name] if mark else [path, *_above(path)]
    query = next((_known[prefix] for prefix in prefixes if prefix in _known), None)
    return name if query is None else f"{path}?{query}"


def hub_endpoint() -> str:
    """The URL of the Hugging Face Hub, or of the server that $HF_ENDPOINT names instead."""
    return (os.environ.get(_HUB_ENDPOINT) or _HUB).rstrip("/")


def token_of(url: SplitResult) -> str | None:
    """The bearer token for the server of a URL; None if there is none.

    It is the environment's, and for the Hub also that of `hf auth login`. DataError if
    $TRAINYARD_TOKENS is malformed; its message does not quote the token.
    """
    chosen = None
    if f"{url.scheme}://{url.netloc}".lower() in (_HUB, hub_endpoint().lower()):
        from huggingface_hub import get_token

        chosen = get_token()
    for item in os.environ.get(TOKENS, "").split():
        server, equals, token = item.partition("=")
        if not (server and equals and token):
            raise DataError(
                "storage.malformed-tokens",
                "TRAINYARD_TOKENS is malformed: write HOST=TOKEN or HOST:PORT=TOKEN, several with "
                "spaces between them",
            )
        if server.lower() in (url.netloc.lower(), f"{url.scheme}://{url.netloc}".lower()):
            chosen = token
    if chosen and not (chosen.isascii() and chosen.isprintable() and " " not in chosen):
        raise DataError(
            "storage.malformed-token",
            "the token for {host} has a character that tokens cannot have",
            host=url.netloc,
        )
    return chosen or None


def _above(url: str) -> list[str]:
    """The folders above a URL, and its server."""
    folders = []
    while not (url := url.rpartition("/")[0]).endswith(":/") and url:
        folders.append(url)
    return folders
