"""Makes Trainyard runnable where there is no network: packages from wheels, the C extension.

Standard library only, since packages may be missing.
"""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "gpu"
WHEELS = WORK / "wheels"  # filled by `make gpu-wheels`
_SITE = WORK / "site"
_BUILD = "from setuptools import setup; setup()"


def prepare() -> dict[str, str]:
    """The environment in which this Python runs Trainyard from this checkout."""
    WORK.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    paths = [str(ROOT)]
    if lacking() or _SITE.exists():
        _install_wheels()
        paths.insert(0, str(_SITE))
    if before := environment.get("PYTHONPATH"):
        paths.append(before)
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    _build_extension(environment)
    return environment


def lacking() -> list[str]:
    """Trainyard's dependencies that are missing here, or too old."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = []
    for requirement in map(Requirement, project["dependencies"]):
        try:
            if not requirement.specifier.contains(version(requirement.name), prereleases=True):
                found.append(requirement.name)
        except PackageNotFoundError:
            found.append(requirement.name)
    return found


def _install_wheels() -> None:
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if _SITE.exists():
        return
    if not wheels:
        print(f"missing: {', '.join(lacking())}; `make gpu-wheels` collects them beforehand")
        raise SystemExit(2)
    print(f"installing {len(wheels)} wheels into {_SITE.relative_to(ROOT)}", flush=True)
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(_SITE), *wheels]
    subprocess.run(command, check=True)


def _build_extension(environment: dict[str, str]) -> None:
    """Builds the C extension in place, without build isolation; says so where that fails."""
    if _has_extension(environment):
        return
    print("building the C extension", flush=True)
    command = [sys.executable, "-c", _BUILD, "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if not _has_extension(environment):
        print(f"the C extension cannot be built:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        print("images are decoded by Pillow: slower", flush=True)


def _has_extension(environment: dict[str, str]) -> bool:
    command = [sys.executable, "-c", "import trainyard.data._native.core"]
    return not subprocess.run(
        command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL
    ).returncode
