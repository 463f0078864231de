"""The HTTP client of this process: aiohttp, in the event loop that fsspec keeps in a thread.

fsspec's own files over HTTP hand out bytes alone, without status and headers: they cannot tell a
part from a whole file, nor one version of a file from the next.
"""

import asyncio
import atexit
import os
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

import aiohttp
from fsspec.asyn import get_loop

IN_FLIGHT = 256
"""Concurrent requests of a process. At 100 ms and one image each they give 2,560 images/s."""
_CONNECT_S, _IDLE_S = 10, 30  # seconds; routers forget connections that are idle for longer
_FIRST_AT_ONCE = 4
_READ_BUFFER = 1 << 20  # bytes; a whole image

Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine in the loop of this process; for threads outside of it."""
    future = asyncio.run_coroutine_threadsafe(work, get_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class _Client:
    """The connections of this process; it is entered for each request."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "User-Agent": "trainyard"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
            read_bufsize=_READ_BUFFER,
            requote_redirect_url=False,
        )
        # A burst may overflow the server's queue of new connections, which loses some. Few requests
        # are therefore made at first, and one more after each answer.
        self._free = asyncio.Semaphore(_FIRST_AT_ONCE)
        self._at_once = _FIRST_AT_ONCE

    async def __aenter__(self) -> aiohttp.ClientSession:
        await self._free.acquire()
        return self._session

    async def __aexit__(self, *_: object) -> None:
        self._free.release()
        if self._at_once < IN_FLIGHT:
            self._at_once += 1
            self._free.release()

    async def close(self) -> None:
        await self._session.close()


@cache
def client_of(loop: asyncio.AbstractEventLoop) -> _Client:
    """The connections of a loop: a forked process has a loop of its own."""
    atexit.register(_close, os.getpid())
    return _Client()


def _close(pid: int) -> None:
    """Ends the connections of this process, without remarks about those in use."""
    if os.getpid() == pid:
        run(_end_all())


async def _end_all() -> None:
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await client_of(loop).close()
