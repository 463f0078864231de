"""Lists the files of a data set on the Hugging Face Hub."""

import json
import re
from fnmatch import filter as matching
from functools import cache
from urllib.parse import urljoin

from urllib3.exceptions import HTTPError

from trainyard.data.storage.hub import hub_path
from trainyard.data.storage.remote.request import Resource, reason_of
from trainyard.data.storage.remote.retry import RetryState, Transient
from trainyard.errors import DataError

_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')


def files_below(location: str) -> list[str]:
    """The sorted names of all files below a location, relative to it. DataError if it has none."""
    place = hub_path(location)
    prefix = f"{place.path}/" if place.path else ""
    names = [
        name.removeprefix(prefix) for name in _all_files(place.listing) if name.startswith(prefix)
    ]
    if not names:
        raise DataError(f"{location}: no files there")
    return names


def files_like(pattern: str) -> list[str]:
    """The sorted names, with hf://, of the files that match a glob, such as …/train-*.parquet."""
    place = hub_path(pattern)
    found = matching(_all_files(place.listing), place.path)
    base = pattern.rstrip("/").removesuffix(place.path)
    depth = place.path.count("/")  # a star stands for no slash
    return [base + name for name in found if name.count("/") == depth]


@cache
def _all_files(listing: str) -> tuple[str, ...]:
    names: list[str] = []
    url: str | None = listing
    while url:
        entries, url = _page(url)
        names += [entry["path"] for entry in entries if entry["type"] == "file"]
    return tuple(sorted(names))


def _page(url: str) -> tuple[list[dict[str, str]], str | None]:
    """A page of the list, and the URL of the next one."""
    resource = Resource(url)
    patience = RetryState(resource.name, resource.server)
    while True:
        try:
            with resource.get(None) as response:
                link = _NEXT.search(response.headers.get("Link", ""))
                entries: list[dict[str, str]] = json.loads(response.read())
            return entries, urljoin(url, link[1]) if link else None
        except FileNotFoundError:
            raise DataError(f"{resource.name}: no such data set or revision") from None
        except PermissionError as error:
            raise DataError(str(error)) from None
        except HTTPError as error:
            patience.wait(Transient(reason_of(error)))
        except Transient as failure:
            patience.wait(failure)
        except ValueError:
            raise DataError(f"{resource.name}: no list of files, as the Hub sends it") from None
