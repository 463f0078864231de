"""Downloads a whole file from a web server: a single image, not a data set."""

import time

from urllib3.exceptions import HTTPError

from trainyard.data.storage.credentials import without_secrets
from trainyard.data.storage.remote.deadline import no_longer_than
from trainyard.data.storage.remote.request import Resource, reason_of
from trainyard.data.storage.remote.retry import Transient
from trainyard.errors import DataError

MAX_BYTES = 100 << 20  # larger than any photograph
MAX_S = 60
_PIECE = 64 << 10  # bytes


def fetch_image(url: str) -> bytes:
    """The content of an http or https URL, after up to five redirects.

    DataError, which names the URL, if it fails, takes over a minute or is over 100 MiB.
    """
    scheme = url.partition("://")[0].lower()
    if scheme not in ("http", "https"):
        raise DataError(
            f"{without_secrets(url)}: images are fetched by http:// and https:// alone, not "
            f"{scheme}://"
        )
    resource = Resource(url)
    until = time.monotonic() + MAX_S
    try:
        with no_longer_than(MAX_S):
            return _fetched(resource)
    except (FileNotFoundError, PermissionError) as error:
        raise DataError(str(error)) from None
    except (Transient, HTTPError) as error:
        reason = str(error) if isinstance(error, Transient) else reason_of(error)
        if time.monotonic() >= until:
            reason = f"not all of it came within {MAX_S} seconds"
        raise DataError(f"{resource.name}: {reason}") from None


def _fetched(resource: Resource) -> bytes:
    content = bytearray()
    with resource.get(None) as response:
        size = response.headers.get("Content-Length", "")
        told = int(size) if size.isdecimal() else None
        while len(content) <= MAX_BYTES and not (told or 0) > MAX_BYTES:
            piece = response.read1(_PIECE)
            if not piece:
                break
            content += piece
        else:
            raise DataError(f"{resource.name}: over {MAX_BYTES >> 20} MiB, too large for an image")
    if told is not None and len(content) < told:
        raise DataError(f"{resource.name}: the transfer was interrupted")
    return bytes(content)
