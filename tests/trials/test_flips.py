"""A bit of a checkpoint flips: an older one is resumed from, and the run ends as without it."""

import random
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.command_line import Capture, newest, run
from tests.runs import assert_same_end, events, exit_code, words
from tests.trials.counts import SEED, count_of

pytestmark = pytest.mark.slow

STOP_AT = 17  # so that checkpoints of steps 10, 15, 16 and 17 are there


@pytest.fixture(scope="module")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that is complete, and the same one stopped on its way."""
    folder = tmp_path_factory.mktemp("runs")
    assert exit_code(words(digits, folder / "whole")) == 0
    stopped = words(digits, folder / "stopped")
    assert exit_code(stopped, stop_at=STOP_AT, number=signal.SIGTERM) == 130
    return folder / "whole", folder / "stopped"


def flip(path: Path, rng: random.Random) -> None:
    """One bit, anywhere."""
    content = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.timeout(0)
def test_a_bit_of_a_checkpoint_flips(
    runs: tuple[Path, Path], digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    whole, stopped = runs
    rng, came_of_it = random.Random(SEED), Counter[str]()
    for number in range(count_of("FLIPS", 3)):
        folder = tmp_path / str(number) / "run"
        shutil.copytree(stopped, folder, symlinks=True)
        files = sorted(path for path in folder.glob("checkpoints/step-*/*") if path.is_file())
        of_newest = [path for path in files if path.parent == newest(folder)]
        path = rng.choice(of_newest if rng.random() < 0.75 else files)
        flip(path, rng)
        capsys.readouterr()
        code = run(*words(digits, folder))
        said = "".join(capsys.readouterr())
        assert code == 0, f"{path}: {said}"
        assert_same_end(folder, whole)
        (resumed,) = events(folder, "resumed")
        assert (path in of_newest) == (resumed["step"] < STOP_AT), path
        came_of_it[f"{path.parent.name} {path.name}: resumed at {resumed['step']}"] += 1
        shutil.rmtree(folder.parent)
    with capsys.disabled():
        print(f"\n{came_of_it.total()} flips, all ended alike:")
        for what, times in sorted(came_of_it.items()):
            print(f"  {times:3d} x {what}")
