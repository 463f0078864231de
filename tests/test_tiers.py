"""The quick tier leaves out what tests/tiers.py lists, and nothing that is gone."""

from pathlib import Path

import pytest

from tests.tiers import NIGHT, SLOW, SMOKES, is_of_the_night, is_slow

ROOT = Path(__file__).parent.parent


ENTRIES = [*(entry for kind in SLOW.values() for entry in kind), *SMOKES, *NIGHT]


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_is_there(entry: str) -> None:
    path, _, name = entry.partition("::")
    assert (ROOT / path).exists()
    assert not name or f"def {name.partition('[')[0]}" in (ROOT / path).read_text()


def test_a_smoke_is_an_exception() -> None:
    file = "tests/averaging/test_gossip.py"
    assert is_slow(f"{file}::test_the_rule_written_out[ring]")
    assert not is_slow(f"{file}::test_complete_without_overlap_is_all_reduce[2]")
    assert not is_slow("tests/averaging/test_topology.py::test_rounds")


def test_the_night_has_slow_tests_alone() -> None:
    assert all(map(is_slow, NIGHT))
    assert is_of_the_night("tests/services/test_ray.py::test_the_run_goes_on_with_another_node")
    assert not is_of_the_night("tests/services/test_ray.py::test_same_losses_as_without_ray")
