"""Objects of S3 and Google Cloud Storage, read by byte ranges through s3fs and gcsfs.

Endpoints and credentials come from the libraries' own configuration, such as AWS_ENDPOINT_URL,
AWS_PROFILE or GOOGLE_APPLICATION_CREDENTIALS.
"""

import asyncio
import errno
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

from trainyard.data.storage.remote.client import IN_FLIGHT
from trainyard.data.storage.remote.remote_file import RemoteFile
from trainyard.data.storage.remote.retry import Transient
from trainyard.errors import DataError
from trainyard.installation import needed

_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}  # with the extra that installs it
_LIBRARIES = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "fsspec", "s3fs")
_NO_CREDENTIALS = ("NoCredentialsError", "DefaultCredentialsError", "ProfileNotFound")
_PERMANENT = (errno.EINVAL, errno.EPERM, errno.ENOSYS)  # s3fs's errors for refused requests


class ObjectFile(RemoteFile):
    """An object in a store."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._scheme, _, self._path = name.partition("://")
        self.server = self._scheme + self._path.partition("/")[0]

    async def stat(self) -> None:
        try:
            details = await self._system()._info(self._path, refresh=True)
        except Exception as error:
            raise self._failure(error) from None
        self.size = int(details["size"])
        self.stamp = [str(details["ETag" if self._scheme == "s3" else "generation"]), self.size]

    async def stream(self, offset: int, size: int) -> AsyncIterator[bytes]:
        receive = self._from_s3 if self._scheme == "s3" else self._from_google
        try:
            content = await receive(offset, offset + size)
        except Exception as error:
            raise self._failure(error) from None
        if len(content) != size:
            raise Transient("the transfer was interrupted")
        yield content

    async def _from_s3(self, start: int, stop: int) -> bytes:
        """The part of the object that was opened: another one fails the condition."""
        system = self._system()
        bucket, key, version = system.split_path(self._path)
        about = {"VersionId": version} if version else {"IfMatch": self._tag()}
        span = f"bytes={start}-{stop - 1}"
        answer = await system._call_s3("get_object", Bucket=bucket, Key=key, Range=span, **about)
        if answer["ContentRange"].partition("/")[0] != span.replace("=", " "):
            raise DataError("storage.wrong-range", url=self.name)
        async with answer["Body"] as body:
            content: bytes = await body.read()
        return content

    async def _from_google(self, start: int, stop: int) -> bytes:
        content: bytes = await self._system()._cat_file(
            self._path, start, stop, generation=self._tag()
        )
        return content

    def _tag(self) -> str:
        """What the store calls this version of the object."""
        return str(self.stamp[0])

    def _system(self) -> Any:
        return _file_system(asyncio.get_running_loop(), self._scheme)

    def _failure(self, error: Exception) -> Exception:
        """Sorts an error of the stores' libraries: retry, no such file, or permanent."""
        text = " ".join(str(error).split()) or type(error).__name__
        kind = type(error).__name__
        if isinstance(error, DataError):
            return error
        if isinstance(error, (FileNotFoundError, PermissionError)):
            return type(error)(f"{self.name}: {text}")
        if "PreconditionFailed" in text or "pre-conditions" in text:
            return self.changed()
        if kind in _NO_CREDENTIALS or getattr(error, "errno", None) in _PERMANENT:
            return DataError("storage.failed", url=self.name, reason=text)
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] in _LIBRARIES:
            return Transient(text)
        return error


@cache
def _file_system(loop: asyncio.AbstractEventLoop, scheme: str) -> Any:
    """The connections of a loop to a store: a forked process has a loop of its own."""
    package, extra = _PACKAGES[scheme]
    module = needed(package, extra, f"{scheme}://")
    common = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":  # its library's default is 10 connections
        return module.S3FileSystem(**common, config_kwargs={"max_pool_connections": IN_FLIGHT})
    return module.GCSFileSystem(**common)
