"""Runs this code and the second edition side by side, and compares to the last bit: `make twins`.

    python -m tests.twins [PATTERN ...]

Rows are in tests/twins/rows.py; a pattern takes those whose names contain it. The second edition is
a worktree in build/twins, with an extension of its own and this environment's packages.
"""

import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from tests.twins.data import make_data
from tests.twins.editions import Edition, RowError, differences
from tests.twins.rows import CHANGED, ROWS

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / "build/twins"
SECOND_EDITION = "544c23981221d7e6c46f7f21d14cc1954f3d0544"  # the last commit before the third
_SHOWN = 4  # differences of a row


def main(patterns: list[str]) -> int:
    """The exit code: 1 if a row differs that is not in CHANGED."""
    begin, console = time.monotonic(), Console(width=120)
    now, before = Edition("now", ROOT), Edition("before", second_edition())
    make_data(before, BUILD / "data")
    names = [name for name in ROWS if any(p in name for p in patterns) or not patterns]
    shutil.rmtree(BUILD / "rows", ignore_errors=True)
    for edition in (now, before):  # each with an index of its own format beside its data
        shutil.copytree(BUILD / "data", BUILD / "rows" / edition.name / "data", symlinks=True)
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda name: compare(name, now, before), names)
        different = [name for name in names if not _shown(console, name, next(found))]
    minutes = (time.monotonic() - begin) / 60
    wrong = [name for name in different if name not in CHANGED]
    console.print(
        f"{len(names) - len(different)} of {len(names)} rows are equal, {len(different)} differ, "
        f"{len(wrong)} of them without a reason; {minutes:.1f} minutes"
    )
    return bool(wrong)


def compare(name: str, now: Edition, before: Edition) -> list[str]:
    """The differences of a row, as texts."""
    number = list(ROWS).index(name)
    try:
        of_before, of_now = (
            edition.outcome(ROWS[name], _folder(edition, number)) for edition in (before, now)
        )
    except RowError as error:
        return [str(error)]
    return list(differences(of_before, of_now))


def _folder(edition: Edition, number: int) -> Path:
    """The folder of a row, beside the data."""
    return BUILD / "rows" / edition.name / f"{number:02}"


def _shown(console: Console, name: str, found: list[str]) -> bool:
    """Prints a row of the table. True if it is equal."""
    verdict = "equal" if not found else "changed" if name in CHANGED else "DIFFERS"
    console.print(f"{verdict:8} {name}", markup=False, highlight=False)
    if found and name in CHANGED:
        console.print(f"         {CHANGED[name]}", markup=False, highlight=False)
    for text in found[:_SHOWN]:
        console.print(f"         {text}", markup=False, highlight=False)
    if len(found) > _SHOWN:
        console.print(f"         and {len(found) - _SHOWN} more")
    return not found


def second_edition() -> Path:
    """The second edition's worktree, with its extension built."""
    path = BUILD / "second-edition"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        add = ["git", "worktree", "add", "--quiet", "--detach", str(path), SECOND_EDITION]
        subprocess.run(add, cwd=ROOT, check=True)
    if not list(path.glob("trainyard/data/_native/core*.so")):
        subprocess.run(
            [
                sys.executable,
                "-c",
                "import setuptools; setuptools.setup()",
                "-q",
                "build_ext",
                "-i",
            ],
            cwd=path,
            check=True,
        )
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
