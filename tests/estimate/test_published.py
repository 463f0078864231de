"""Estimates beside what others have published: benchmarks/published.toml."""

import pytest

from benchmarks.published import ROWS, covered, run, throughput, typical

pytestmark = pytest.mark.night

LARGE = "vit_giant_patch14_224"  # slow to go through
OTHERS = ("resnet50-24ep", "resnet50-32ep", "resnet50-40ep")  # of FFCV, in the same proportion


def test_published_throughputs_and_runs() -> None:
    """Typically within a seventh, as benchmarks/results says, and in the range that is printed."""
    rates = [throughput(row).longer for row in ROWS["throughputs"] if row["model"] != LARGE]
    runs = [run(row) for row in ROWS["runs"] if row["recipe"] not in OTHERS]
    assert (len(rates), len(runs)) == (8, 8)
    assert typical(rates) < 1.15
    known = [cell.longer for cell in runs if cell.source != "system D"]
    assert typical(known) < 1.2
    # A known miss: that server took up to 2.5 times what its GPUs need.
    missed = [cell for cell in runs if not covered([cell.longer])]
    assert [cell.what for cell in missed] == ["vit-b16-lamb-32k"]
    assert missed[0].longer < 2.6
    assert covered(rates) == len(rates)
