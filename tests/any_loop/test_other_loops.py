"""The loader in the loops of other libraries, as docs/other-loops.md has it.

Each program trains for two epochs, is killed in the second and started again: its weights are those
of a run that was not killed. timm's train.py and torchvision's reference are taken out of
checkouts of their repositories, build/checkouts/timm and build/checkouts/vision.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.loaders.environments import install, python_of
from tests.any_loop.patched import FILES, PAGE, patched
from tests.docs.pages import ROOT, blocks

HERE = Path(__file__).parent
PROGRAMS = sorted(HERE.glob("programs/with_*.py"))
CHECKOUTS = ROOT / "build" / "checkouts"
EPOCH = 22  # steps of 64 images
KILL_AFTER = 38

Words = list[str]


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of an environment with the libraries, which is made once."""
    reason = install(ROOT / "build", "any-loop", HERE)
    if reason:
        pytest.skip(f"needs the packages of any-loop.txt: {reason}")
    return str(python_of(ROOT / "build", "any-loop"))


def check(python: str, ranks: int, folder: Path, words: Callable[[Path], Words]) -> int:
    """Steps of the second run at which it went on. `words`: the program with its arguments."""

    def start(name: str, kill_after: int, *, ranks: int = ranks) -> int:
        (folder / name).mkdir(exist_ok=True)
        recorded = ["tests.any_loop.recorded", str(folder / f"{name}.log"), str(kill_after)]
        launched = ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
        done = subprocess.run(
            [python, "-m", *(launched if ranks > 1 else []), *recorded, *words(folder / name)],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert kill_after or done.returncode == 0, done.stderr[-3000:]
        return done.returncode

    one_process = 1 if "with_ray" in words(folder)[0] else ranks  # which starts the ranks
    start("whole", 0, ranks=one_process)
    if start("killed", KILL_AFTER, ranks=one_process):
        start("killed", 0, ranks=one_process)
    whole, killed = ((folder / f"{name}.log").read_text().split() for name in ("whole", "killed"))
    assert len(set(whole)) == len(whole) == 2 * EPOCH
    went_on_at = KILL_AFTER + len(whole) - len(killed)
    assert killed == whole[:KILL_AFTER] + whole[went_on_at:]
    return went_on_at


@pytest.mark.night
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_killed_run_goes_on_in_mid_epoch(
    python: str, program: Path, ranks: int, digits: Path, tmp_path: Path
) -> None:
    if program.stem == "with_keras" and ranks > 1:
        pytest.skip("one process: train_on_batch has no ranks; no GPU at hand")
    if program.stem == "with_ray":
        python = sys.executable

    def words(folder: Path) -> Words:
        of_ray = [str(ranks)] if program.stem == "with_ray" else []
        return [str(program), str(digits), str(folder), *of_ray]

    assert EPOCH < check(python, ranks, tmp_path, words) < KILL_AFTER


@pytest.fixture(params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def script_of(name: str, folder: Path) -> Path:
    if not (CHECKOUTS / name / FILES[name]).is_file():
        pytest.skip(f"needs a checkout: {CHECKOUTS / name}")
    return patched(name, CHECKOUTS / name, folder)


@pytest.mark.night
@pytest.mark.parametrize("schedule", ["--sched-on-updates", "--sched=step"])
def test_timm(ranks: int, schedule: str, digits: Path, tmp_path: Path) -> None:
    script = script_of("timm", tmp_path)

    def words(folder: Path) -> Words:
        told = ["--data-dir", str(digits), "--model=test_resnet", "--num-classes=10", schedule]
        told += ["--img-size=32", f"--batch-size={64 // ranks}", "--device=cpu", "--epochs=2"]
        told += ["--lr=0.01", "--recovery-interval=5", "--output", str(folder)]
        saved = sorted(folder.glob("*/recovery-1-*"), key=os.path.getmtime)
        return [str(script), *told, *(["--resume", str(saved[-1])] if saved else [])]

    assert check(sys.executable, ranks, tmp_path, words) == EPOCH + 15


@pytest.mark.night
def test_torchvision(ranks: int, digits: Path, tmp_path: Path) -> None:
    script = script_of("vision", tmp_path)

    def words(folder: Path) -> Words:
        told = ["--data-path", str(digits), "--model=shufflenet_v2_x0_5", "--device=cpu"]
        told += ["--train-crop-size=32", "--val-crop-size=32", "--val-resize-size=32"]
        told += [f"--batch-size={64 // ranks}", "--lr=0.01", "--output-dir", str(folder)]
        told += ["--epochs=2", "--workers=0"]
        saved = folder / "checkpoint.pth"
        return [str(script), *told, *(["--resume", str(saved)] if saved.exists() else [])]

    assert check(sys.executable, ranks, tmp_path, words) == EPOCH  # it saves at ends of epochs


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_the_page_shows_lines_of_the_program(program: Path) -> None:
    shown = [lines_of(b.text) for b in blocks(PAGE) if b.language == "python"]
    assert len(shown) == len(PROGRAMS)
    assert sum(lines in lines_of(program.read_text()) for lines in shown) == 1


def lines_of(text: str) -> str:
    """Its lines, without those that are empty, and without indentation."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())
