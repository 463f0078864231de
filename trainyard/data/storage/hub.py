"""Files on the Hugging Face Hub: hf://datasets/OWNER/NAME[@REVISION][/PATH].

huggingface_hub lists them, names their URLs and has the token, by HF_TOKEN or `hf auth login`;
HF_ENDPOINT names another server.
"""

import re
from fnmatch import filter as matching
from functools import cache
from typing import NamedTuple

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


def is_on_hub(name: str) -> bool:
    """True for a name that begins with hf://."""
    return name[: len(SCHEME)].lower() == SCHEME


def hub_path(name: str) -> HubPath:
    """The parts of a name. DataError if it names no data set."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise DataError(
            "hub.bad-name",
            "{url}: write hf://datasets/OWNER/NAME, or …/NAME@REVISION/PATH",
            url=name,
        )
    return HubPath(match["repo"], match["revision"] or "main", (match["path"] or "").strip("/"))


def web_url(name: str) -> str:
    """The URL to request for a file by its name: of the Hub if it is there."""
    if not is_on_hub(name):
        return name
    from huggingface_hub import hf_hub_url

    repo, revision, path = hub_path(name)
    endpoint = hub_endpoint()
    return hf_hub_url(repo, path, repo_type="dataset", revision=revision, endpoint=endpoint)


def files_below(location: str) -> list[str]:
    """The sorted names of all files below a location, relative to it. DataError if it has none."""
    repo, revision, path = hub_path(location)
    prefix = f"{path}/" if path else ""
    found = _all_files(hub_endpoint(), repo, revision)
    names = [name.removeprefix(prefix) for name in found if name.startswith(prefix)]
    if not names:
        raise DataError("hub.empty-folder", "{location}: no files there", location=location)
    return names


def files_like(pattern: str) -> list[str]:
    """The sorted names, with hf://, of the files that match a glob, such as …/train-*.parquet."""
    repo, revision, path = hub_path(pattern)
    found = matching(_all_files(hub_endpoint(), repo, revision), path)
    base = pattern.rstrip("/").removesuffix(path)
    depth = path.count("/")  # a star stands for no slash
    return [base + name for name in found if name.count("/") == depth]


@cache
def _all_files(endpoint: str, repo: str, revision: str) -> tuple[str, ...]:
    """DataError if the Hub does not list them."""
    from huggingface_hub import HfApi, errors

    name = f"{SCHEME}datasets/{repo}@{revision}"
    try:
        names = HfApi(endpoint).list_repo_files(repo, repo_type="dataset", revision=revision)
    except errors.GatedRepoError:
        raise DataError("hub.gated", url=name) from None
    except (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.HFValidationError,
    ):
        raise DataError(
            "hub.unknown-data-set",
            "{url}: no such data set or revision, or a private one",
            url=name,
        ) from None
    except (errors.HTTPError, OSError) as error:
        raise DataError("storage.failed", url=name, reason=" ".join(str(error).split())) from None
    except (KeyError, ValueError):
        raise DataError(
            "hub.malformed-listing", "{url}: no list of files, as the Hub sends it", url=name
        ) from None
    return tuple(sorted(names))
