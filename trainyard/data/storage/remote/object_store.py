"""Objects of S3 and Google Cloud Storage, read by byte ranges through fsspec.

Endpoints and credentials come from the libraries' own configuration, such as AWS_ENDPOINT_URL,
AWS_PROFILE or GOOGLE_APPLICATION_CREDENTIALS.
"""

import errno
import importlib
import os
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any, TypeVar

from trainyard.data.storage.remote.prefetch import Limits
from trainyard.data.storage.remote.retry import RetryState, Transient
from trainyard.data.storage.source import Stamp
from trainyard.errors import DataError
from trainyard.installation import install_hint

_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}  # with the extra that installs it
_LIBRARIES = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "fsspec", "s3fs")
_NO_CREDENTIALS = ("NoCredentialsError", "DefaultCredentialsError", "ProfileNotFound")
_PERMANENT = (errno.EINVAL, errno.EPERM, errno.ENOSYS)  # s3fs's errors for refused requests
_lock = Lock()

Result = TypeVar("Result")


class ObjectFile:
    """An object in a store. OSError if it does not exist; safe to read from many threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._scheme, _, self._path = name.partition("://")
        with _lock:
            self._system = _file_system(os.getpid(), self._scheme)
        file = self._patiently(lambda: self._system.open(self._path, "rb", cache_type="none"))
        self.size = int(file.details["size"])
        tag = file.details.get("ETag") or file.details.get("etag") or ""
        self.stamp: Stamp = [str(tag), self.size]
        # Both functions fail once another object has replaced this one.
        if self._scheme == "s3":
            self._fetch: Callable[[int, int], bytes] = file._fetch_range
        else:
            self._fetch = self._generation(file.details["generation"])

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise OSError(f"{self.name} is truncated or has changed since it was indexed")
        if not size:
            return b""
        try:
            return self._patiently(lambda: self._whole(offset, size))
        except (FileNotFoundError, PermissionError) as error:
            raise DataError(f"{self.name}: {error}; it was readable before") from None

    def close(self) -> None:
        """Does nothing: connections belong to the process."""

    def _generation(self, number: str) -> Callable[[int, int], bytes]:
        def fetch(start: int, end: int) -> bytes:
            content: bytes = self._system.cat_file(self._path, start, end, generation=number)
            return content

        return fetch

    def _whole(self, offset: int, size: int) -> bytes:
        content = self._fetch(offset, offset + size)
        if len(content) != size:
            raise Transient("the transfer was interrupted")
        return content

    def _patiently(self, attempt: Callable[[], Result]) -> Result:
        patience = RetryState(self.name, self._scheme + self._path.partition("/")[0])
        while True:
            try:
                return attempt()
            except Exception as error:
                failure = _failure(self.name, error)
                if not isinstance(failure, Transient):
                    raise failure from None
            patience.wait(failure)


def _failure(name: str, error: Exception) -> Exception:
    """Sorts an error of the stores' libraries: retry, no such file, or permanent."""
    text = " ".join(str(error).split()) or type(error).__name__
    kind = type(error).__name__
    if isinstance(error, (Transient, FileNotFoundError, PermissionError)):
        return error
    if kind == "FileExpired" or "PreconditionFailed" in text or "pre-conditions" in text:
        return DataError(
            f"{name} has changed in its store while it was in use: start again, and it is indexed "
            "anew"
        )
    if kind in _NO_CREDENTIALS or getattr(error, "errno", None) in _PERMANENT:
        return DataError(f"{name}: {text}")
    if isinstance(error, OSError) or type(error).__module__.split(".")[0] in _LIBRARIES:
        return Transient(text)
    return error


@cache
def _file_system(pid: int, scheme: str) -> Any:
    """This process's connections to a store, which a forked process must not share."""
    package, extra = _PACKAGES[scheme]
    try:
        module = importlib.import_module(package)
    except ImportError:
        raise DataError(f"{scheme}:// needs {package}: {install_hint(extra)}") from None
    common = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":  # its library's default is 10 connections
        connections = {"max_pool_connections": Limits().in_flight}
        return module.S3FileSystem(**common, config_kwargs=connections)
    return module.GCSFileSystem(**common)
