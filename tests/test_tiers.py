"""The quick tier leaves out what tests/tiers.py lists, and nothing that is gone."""

from pathlib import Path

import pytest

from tests.tiers import SLOW, SMOKES, is_slow

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("entry", [*(entry for kind in SLOW.values() for entry in kind), *SMOKES])
def test_an_entry_is_there(entry: str) -> None:
    path, _, name = entry.partition("::")
    assert (ROOT / path).exists()
    assert not name or f"def {name.partition('[')[0]}" in (ROOT / path).read_text()


def test_a_smoke_is_an_exception() -> None:
    file = "tests/averaging/test_gossip.py"
    assert is_slow(f"{file}::test_the_rule_written_out[ring]")
    assert not is_slow(f"{file}::test_complete_without_overlap_is_all_reduce[2]")
    assert not is_slow("tests/averaging/test_topology.py::test_rounds")
