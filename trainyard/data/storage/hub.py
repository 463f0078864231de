"""Names of files on the Hugging Face Hub: hf://datasets/OWNER/NAME[@REVISION][/PATH].

As in huggingface_hub, HF_ENDPOINT names another server, and HF_TOKEN is the token for it.
"""

import re
from typing import NamedTuple
from urllib.parse import quote

from trainyard.data.storage.credentials import hub_endpoint
from trainyard.errors import DataError

SCHEME = "hf://"
_NAME = re.compile(
    r"hf://datasets/(?P<repo>[^/@\s]+/[^/@\s]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)


class HubPath(NamedTuple):
    repo: str  # OWNER/NAME
    revision: str
    path: str  # in the repository; "" for all of it

    @property
    def url(self) -> str:
        """The URL of a file."""
        return f"{self._start}/resolve/{quote(self.revision, safe='')}/{quote(self.path)}"

    @property
    def listing(self) -> str:
        """The URL of the list of all files."""
        revision = quote(self.revision, safe="")
        return f"{hub_endpoint()}/api/datasets/{self.repo}/tree/{revision}?recursive=1"

    @property
    def _start(self) -> str:
        return f"{hub_endpoint()}/datasets/{self.repo}"


def is_on_hub(name: str) -> bool:
    """True for a name that begins with hf://."""
    return name[: len(SCHEME)].lower() == SCHEME


def hub_path(name: str) -> HubPath:
    """The parts of a name. DataError if it names no data set."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise DataError(f"{name}: write hf://datasets/OWNER/NAME, or …/NAME@REVISION/PATH")
    return HubPath(found["repo"], found["revision"] or "main", (found["path"] or "").strip("/"))


def web_url(name: str) -> str:
    """The URL to request for a file by its name: of the Hub if it is there."""
    return hub_path(name).url if is_on_hub(name) else name
