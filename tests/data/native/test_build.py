"""The package installs with a C compiler and without one."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def wheel(tmp_path: Path, compiler: str) -> tuple[Path, str]:
    """A wheel built of a copy of the sources, and what the build said."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "trainyard", source / "trainyard", ignore=shutil.ignore_patterns("*.so"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"),
            *("-w", str(tmp_path), str(source)),
        ],
        env=os.environ | {"CC": compiler, "LDSHARED": f"{compiler} -shared"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (path,) = tmp_path.glob("*.whl")
    return path, done.stdout


def extensions(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [name for name in archive.namelist() if name.endswith(".so")]


def test_without_a_compiler_the_package_is_plain_python(tmp_path: Path) -> None:
    path, said = wheel(tmp_path, "no-such-compiler")
    assert extensions(path) == []
    assert "no-such-compiler" in said


@pytest.mark.night
def test_clang_builds_it_too(tmp_path: Path) -> None:
    """gcc builds the wheel of tests/test_wheel.py."""
    if not shutil.which("clang-16"):
        pytest.skip("needs clang-16: apt install clang-16")
    path, said = wheel(tmp_path, "clang-16")
    assert extensions(path) == ["trainyard/data/_native/core.abi3.so"]
    assert "-cp311-abi3-" in path.name
    assert not re.findall(r"_native/.*warning: .*", said)
    installed = tmp_path / "installed"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(installed)
    shown = subprocess.run(
        [sys.executable, "-c", "from trainyard.data._native import core; print(core.paths)"],
        env=os.environ | {"PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "'plain'" in shown.stdout
