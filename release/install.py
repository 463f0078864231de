"""Installs what is released into empty environments, and runs the demo there.

    python release/install.py build/dist [TORCH ...]

In an environment of every Python from 3.11 that is found, beside every version of torch that is
named (or else the oldest that pyproject.toml allows and the newest): the wheel, then the source
distribution with a compiler and without one. Prints a row of a table for each; a failure ends it.
An environment has up to 6 GB with CUDA, and is removed before the next one.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
HEAD = "| Python | torch | from | core | install, s | environment, MB | demo, s | top-1 |"
# Each loads the data, trains and evaluates: the whole demo, or an epoch of it.
DEMO = ("launch", "local", "digits", "--ranks", "2", "--plain")
EPOCH = ("train", "digits", "--run.length", "1 epochs", "--plain")
TOP1 = "import trainyard; print(f\"{trainyard.evaluate('runs/digits')['top1']:.1%}\")"
CORE = "from trainyard.data._native import core; print('compiled' if core else 'none')"


def pythons() -> Iterator[tuple[str, Path]]:
    """Every Python on the path or of pyenv, by its version."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in PYTHONS:
        of_pyenv = sorted(versions.glob(f"{version}.*/bin/python{version}"))
        found = of_pyenv[-1] if of_pyenv else shutil.which(f"python{version}")
        if found:
            yield version, Path(found)
        else:
            print(f"no Python {version} on this machine", file=sys.stderr)


def oldest_torch() -> str:
    """The oldest version of torch that pyproject.toml allows."""
    (version,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    return f"{version}.0" if version.count(".") == 1 else version


class Environment:
    """An environment in a folder that begins empty."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        run([python, "-m", "venv", folder / "venv"], folder)

    def install(self, *words: str | Path, compiler: str = "cc") -> float:
        """Runs pip; returns the seconds that it took."""
        begin = time.monotonic()
        building = {"CC": compiler, "LDSHARED": f"{compiler} -shared"}
        words = ("install", "--quiet", "--no-cache-dir", *words)
        run([self.bin / "python", "-m", "pip", *words], self.folder, building)
        return time.monotonic() - begin

    def megabytes(self) -> float:
        paths = (path for path in (self.folder / "venv").rglob("*") if not path.is_symlink())
        return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6

    def demo(self, *words: str) -> tuple[float, str]:
        """Prepares the digits in an empty folder and trains; returns seconds and top-1."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        begin = time.monotonic()
        run([self.bin / "trainyard", "data", "prepare", "digits", "data/digits"], folder)
        run([self.bin / "trainyard", *words], folder)
        seconds = time.monotonic() - begin
        return seconds, run([self.bin / "python", "-c", TOP1], folder).splitlines()[-1]

    def core(self) -> str:
        return run([self.bin / "python", "-c", CORE], self.folder).strip()


def run(words: list[str | Path], folder: Path, more: dict[str, str] | None = None) -> str:
    """What a command prints; ends this program with its errors if it fails."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(words, cwd=folder, env=env | (more or {}), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def rows(version: str, python: Path, torch: str, dist: Path) -> Iterator[str]:
    """The rows of the table for a Python and a torch."""
    (wheel,) = dist.glob(f"*_{os.uname().machine}.whl")
    (sources,) = dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="trainyard-") as name:
        there = Environment(python, Path(name))
        cases: tuple[tuple[str, list[str | Path], str, tuple[str, ...]], ...] = (
            ("wheel", [wheel, *([f"torch=={torch}"] if torch else [])], "cc", DEMO),
            ("sdist", ["--no-deps", "--force-reinstall", sources], "cc", EPOCH),
            ("sdist, no compiler", ["--no-deps", "--force-reinstall", sources], "no-cc", EPOCH),
        )
        for about, words, compiler, demo in cases:
            took = there.install(*words, compiler=compiler)
            seconds, top1 = there.demo(*demo)
            used = run([there.bin / "python", "-c", "import torch; print(torch.__version__)"], dist)
            figures = f"{took:.0f} | {there.megabytes():,.0f} | {seconds:.0f} | {top1}"
            yield f"| {version} | {used.strip()} | {about} | {there.core()} | {figures} |"


def main(folder: str, *torches: str) -> None:
    print(HEAD, "|---" * HEAD.count(" | ") + "|---|", sep="\n", flush=True)
    for version, python in pythons():
        for torch in torches or (oldest_torch(), ""):
            for row in rows(version, python, torch, Path(folder).resolve()):
                print(row, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
