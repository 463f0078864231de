"""Downloads a whole file from a web server: a single image, not a data set."""

import asyncio

from trainyard.data.storage.credentials import without_secrets
from trainyard.data.storage.remote.client import run
from trainyard.data.storage.remote.request import Resource, total_size
from trainyard.data.storage.remote.retry import Transient
from trainyard.data.storage.source import reason_of
from trainyard.errors import DataError

MAX_BYTES = 100 << 20  # larger than any photograph
MAX_S = 60


def fetch_image(url: str) -> bytes:
    """The content of an http or https URL, after up to five redirects.

    DataError, which names the URL, if it fails, takes over a minute or is over 100 MiB.
    """
    scheme = url.partition("://")[0].lower()
    if scheme not in ("http", "https"):
        raise DataError("storage.image-not-on-web", url=without_secrets(url), scheme=scheme)
    resource = Resource(url)
    try:
        return run(_fetched(resource))
    except TimeoutError:
        reason = f"not all of it came within {MAX_S} seconds"
    except (FileNotFoundError, PermissionError) as error:
        reason = reason_of(error, resource.name)
    except Transient as failure:
        reason = str(failure)
    raise DataError("storage.failed", url=resource.name, reason=reason)


async def _fetched(resource: Resource) -> bytes:
    content = bytearray()
    async with asyncio.timeout(MAX_S), resource.get(None) as response:
        while (total_size(response) or len(content)) <= MAX_BYTES >= len(content):
            part = await response.content.readany()
            if not part:
                return bytes(content)
            content += part
    raise DataError("storage.image-too-large", url=resource.name, most_mib=MAX_BYTES >> 20)
