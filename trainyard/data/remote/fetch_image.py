"""A file from a web server, whole: for one image, not for a data set."""

import time

from urllib3.exceptions import HTTPError

from trainyard.data.remote.patience import Transient
from trainyard.data.remote.request import Resource, reason_of
from trainyard.data.source import without_login
from trainyard.errors import DataError

MAX_BYTES = 100 << 20  # more is no photograph
MAX_S = 60
_PIECE = 64 << 10  # bytes


def fetch_image(url: str) -> bytes:
    """What an http or https URL names, by way of up to five redirects.

    DataError, which names the URL, where it cannot be had within a minute or is over 100 MiB.
    """
    scheme = url.partition("://")[0].lower()
    if scheme not in ("http", "https"):
        raise DataError(
            f"{without_login(url)}: images are fetched by http:// and https:// alone, not "
            f"{scheme}://"
        )
    resource = Resource(url)
    try:
        return _fetched(resource)
    except (FileNotFoundError, PermissionError) as error:
        raise DataError(str(error)) from None
    except Transient as failure:
        raise DataError(f"{resource.name}: {failure}") from None
    except HTTPError as error:
        raise DataError(f"{resource.name}: {reason_of(error)}") from None


def _fetched(resource: Resource) -> bytes:
    until = time.monotonic() + MAX_S
    content = bytearray()
    with resource.get(None) as response:
        size = response.headers.get("Content-Length", "")
        told = int(size) if size.isdecimal() else None
        while len(content) <= MAX_BYTES and not (told or 0) > MAX_BYTES:
            piece = response.read1(_PIECE)
            if not piece:
                break
            if time.monotonic() > until:
                raise DataError(f"{resource.name}: not all of it came within {MAX_S} seconds")
            content += piece
        else:
            raise DataError(f"{resource.name}: over {MAX_BYTES >> 20} MiB, which no image has")
    if told is not None and len(content) < told:
        raise DataError(f"{resource.name}: the transfer broke off")
    return bytes(content)
