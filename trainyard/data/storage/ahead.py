"""Runs calls in a pool of threads, with results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


_LOOKS = 512  # of a thread in a row, at most
_THREADS = 128  # a file server answers each look after a while


def look_at(look: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """What `look` says of each item of a local file system, in order; many are asked at a time."""
    length = min(_LOOKS, len(items) // _THREADS + 1)
    parts = [items[first : first + length] for first in range(0, len(items), length)]
    if len(parts) < 2:
        return [*map(look, items)]
    with ThreadPoolExecutor(_THREADS) as pool:
        return [*chain.from_iterable(pool.map(lambda part: [*map(look, part)], parts))]


def map_ahead(
    pool: Executor, action: Callable[[Item], Result], items: Iterable[Item], *, most: int
) -> Iterator[Result]:
    """Yields each item's result in order; at most `most` calls are pending or not yet taken."""
    calls: deque[Future[Result]] = deque()
    for item in items:
        calls.append(pool.submit(action, item))
        if len(calls) == most:
            yield calls.popleft().result()
    while calls:
        yield calls.popleft().result()
