"""What `make wheel` builds installs by itself and trains."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from release.contents import CORE, faults_of_wheel

ROOT = Path(__file__).parent.parent
MACHINE = os.uname().machine
pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(shutil.which("make") is None, reason="needs make"),
]
BARE = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "MAKE"))}


def make(dist: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    words = ["make", "wheel", f"DIST={dist}", f"CC={compiler}", f"PYTHON={sys.executable}"]
    return subprocess.run(words, cwd=ROOT, env=BARE, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dist = tmp_path_factory.mktemp("dist")
    done = make(dist, "gcc")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.findall(r"_native/.*warning: .*", done.stdout + done.stderr)
    (path,) = dist.glob("*.whl")
    assert len(list(dist.glob("*.tar.gz"))) == 1
    return path


def test_one_wheel_serves_every_python_and_old_systems(wheel: Path) -> None:
    assert re.fullmatch(
        rf"trainyard_images-\S+-cp311-abi3-\S*manylinux_2_17_{MACHINE}\.whl", wheel.name
    )
    assert [*faults_of_wheel(wheel, MACHINE)] == []


def test_a_core_that_cannot_be_compiled_ends_make_wheel(tmp_path: Path) -> None:
    """setuptools alone would build a wheel without it, and exit with 0."""
    done = make(tmp_path, "false")
    assert done.returncode != 0
    assert f"has no compiled core, {CORE}" in done.stderr
    assert list(tmp_path.glob("*.whl")) == []


def test_a_wheel_with_other_files_is_refused(wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            if not name.endswith("page.js"):
                new.writestr(name, old.read(name))
        new.writestr("trainyard/data/_native/files.c", "")
    assert [*faults_of_wheel(other, MACHINE)] == [
        "lacks trainyard/report/page.js",
        "has trainyard/data/_native/files.c, which does not belong there",
    ]


def test_an_installed_wheel_trains_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """`make test-wheels` does it with every Python, and torch installed anew."""
    venv, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True, env=BARE)
    (site,) = venv.glob("lib/python*/site-packages")
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    (site / "rest.pth").write_text(f"{Path(torch.origin).parent.parent}\n")

    def run(*words: str) -> str:
        command = [str(venv / "bin" / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=empty, env=BARE, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    code = "import trainyard; from trainyard.data._native import core; print(core.__file__)"
    assert run("python", "-c", code) == f"{site / CORE}\n"
    assert run("trainyard", "--version") == f"trainyard {wheel.name.split('-')[1]}\n"
    run("trainyard", "data", "prepare", "digits", "data/digits")
    assert "top-1" in run("trainyard", "train", "digits", "--run.length", "1 epochs", "--plain")
    assert (empty / "runs" / "digits" / "report.html").exists()
