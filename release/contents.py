"""Refuses a wheel or source distribution that lacks a file, or has one too many.

    python release/contents.py MACHINE FILE.whl FILE.tar.gz

The package in the repository, as git lists it, is what they must have: the wheel without C sources
and with the compiled core for MACHINE, which setuptools leaves out in silence if it cannot be
compiled.
"""

import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = "trainyard/data/_native/core.abi3.so"
MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine in the header of an ELF file


def package() -> set[str]:
    """The files of the package in the repository."""
    command = ["git", "-C", str(ROOT), "ls-files", "trainyard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).exists()}


def faults_of_wheel(path: Path, machine: str) -> Iterator[str]:
    """What is wrong with a wheel, a line each."""
    with zipfile.ZipFile(path) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
        names = {name for name in files if ".dist-info/" not in name}
        core = archive.read(CORE) if CORE in names else b""
    if not core:
        yield f"has no compiled core, {CORE}: look for the compiler's error above"
    elif core[:4] != b"\x7fELF" or core[18] != MACHINES[machine]:
        yield f"{CORE} is not for {machine}"
    sources = {name for name in package() if name.endswith((".c", ".h"))}
    yield from differences(names - {CORE}, package() - sources)


def faults_of_sources(path: Path) -> Iterator[str]:
    """What is wrong with a source distribution, a line each."""
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        files = {
            name for name in names if (ROOT / name).is_file() and name.startswith("trainyard/")
        }
    yield from differences(files, package())
    needed = {"pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"}
    yield from (f"lacks {name}" for name in sorted(needed - names))


def differences(there: set[str], wanted: set[str]) -> Iterator[str]:
    yield from (f"lacks {name}" for name in sorted(wanted - there))
    yield from (f"has {name}, which does not belong there" for name in sorted(there - wanted))


def main(machine: str, *paths: str) -> int:
    """Prints every fault; returns how many files have one."""
    bad = 0
    for path in map(Path, paths):
        is_wheel = path.suffix == ".whl"
        faults = [*(faults_of_wheel(path, machine) if is_wheel else faults_of_sources(path))]
        for fault in faults:
            print(f"{path.name}: {fault}", file=sys.stderr)
        bad += bool(faults)
    return bad


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
