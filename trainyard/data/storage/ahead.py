"""Runs calls in a pool of threads: results in order, a bounded number of calls ahead."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


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
