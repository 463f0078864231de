"""The order of tests in a session of several processes."""

from pathlib import Path
from typing import Any

from tests.tiers import in_parts


class Item:
    """A test of a file, with the names of its markers."""

    def __init__(self, path: str, *marks: str) -> None:
        self.path, self.marks = Path(path), marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def test_each_process_gets_quick_ones_and_then_whole_slow_files() -> None:
    slow = {name: [Item(name, "slow") for _ in range(3)] for name in ("a", "services/b")}
    quick = [Item("a"), Item("services/b", "slow", "quick"), Item("c"), Item("c")]
    mixed: list[Any] = [*slow["a"], *quick[:3], *slow["services/b"], quick[3]]
    one: list[Any] = [*quick, *slow["services/b"], *slow["a"]]
    assert in_parts(mixed, 1) == one
    two: list[Any] = [*quick[::2], *slow["services/b"], *quick[1::2], *slow["a"]]
    assert in_parts(mixed, 2) == two
