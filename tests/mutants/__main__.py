"""Puts one fault after the other into a copy of this code, and looks which tests find it.

    python -m tests.mutants [SUBJECT | NAME ...] [--slow OF] [--whole] [--json FILE]

The faults are in faults.toml. Without names all of them take their turn. A fault is found by a test
that fails with it twice and passes without it. README.md says what came of it.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
QUICK, SLOW = "quick or not (slow or night)", "slow and not (quick or night)"
ANY = "slow or not slow"
LIMIT_S, WHOLE_S = 600.0, 3600.0  # for the tests of a fault's own in a tier, and for the quick tier
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    name: str
    subject: str
    file: str
    old: str
    new: str
    tests: list[str]

    @property
    def is_stale(self) -> bool:
        """True unless `old` stands once in its file, and its tests are there."""
        there = all((ROOT / path).exists() for path in (self.file, *self.tests))
        return not there or (ROOT / self.file).read_text().count(self.old) != 1


@dataclass
class Outcome:
    state: str  # found, not found, too slow, stale
    by: list[str] = field(default_factory=list)  # the tests that found it
    tier: str = ""
    seconds: float = 0.0


@dataclass
class Tree:
    """A copy of this code, with some faults."""

    root: Path

    def failures(self, tests: Sequence[str], marks: str, limit_s: float = LIMIT_S) -> list[str]:
        """The tests that fail; none if they take longer than the limit."""
        if not tests:
            return []
        words = ["-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--timeout=120", "-m", marks]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *words, *tests],
                cwd=self.root,
                env=os.environ | {"PYTHONPATH": str(self.root)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return []
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return list(dict.fromkeys(_FAILED.findall(output.read())))


def faults() -> list[Fault]:
    found = tomllib.loads((Path(__file__).parent / "faults.toml").read_text())
    return [Fault(name, **values) for name, values in found.items()]


@contextmanager
def tree_with(*some: Fault) -> Iterator[Tree]:
    """A copy of this code with these faults, as long as the context lasts."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    extension = (str(path.relative_to(ROOT)) for path in ROOT.glob("trainyard/data/_native/*.so"))
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        for name in (*filter(None, names.split("\0")), *extension):
            if (ROOT / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
        (root / ".venv").symlink_to(ROOT / ".venv")
        for fault in some:
            path = root / fault.file
            path.write_text(path.read_text().replace(fault.old, fault.new))
        yield Tree(root)


_fails_without: dict[str, bool] = {}


def sound(tests: Iterable[str]) -> list[str]:
    """The tests among these that pass without a fault."""
    tests = list(tests)
    if new := [test for test in tests if test not in _fails_without]:
        with tree_with() as tree:
            failed = tree.failures(new, ANY)
        _fails_without.update((test, test in failed) for test in new)
    return [test for test in tests if not _fails_without[test]]


def tried(fault: Fault, slow: str) -> Outcome:
    """The outcome of a fault under all its own quick tests, and the slow ones.

    `slow`: of which faults these run: "none", "rest" (no quick test finds them), "all".
    """
    if fault.is_stale:
        return Outcome("stale")
    begin, found = time.monotonic(), dict[str, list[str]]()
    with tree_with(fault) as tree:
        for tier, marks in (("quick", QUICK), ("slow", SLOW)):
            if tier == "quick" or slow == "all" or (slow == "rest" and not found):
                twice = tree.failures(sound(tree.failures(fault.tests, marks)), ANY)
                found |= {tier: twice} if twice else {}
    seconds = time.monotonic() - begin
    if found:
        by = [test for of_tier in found.values() for test in of_tier]
        return Outcome("found", by, next(iter(found)), seconds)
    return Outcome("not found" if seconds < LIMIT_S else "too slow", seconds=seconds)


def tried_by_all(some: Sequence[Fault]) -> dict[str, Outcome]:
    """The outcomes under the whole quick tier of faults that their own tests do not find.

    It runs once, with all of them; then the tests that fail run with each fault alone.
    """
    begin, found = time.monotonic(), dict[str, Outcome]()
    with tree_with(*some) as tree:
        tests = sound(tree.failures(["tests"], QUICK, WHOLE_S))
    for fault in some if tests else ():
        with tree_with(fault) as tree:
            if by := tree.failures(tests, ANY):
                found[fault.name] = Outcome("found", by, "whole", time.monotonic() - begin)
    return found


def table(some: Sequence[Fault], outcomes: dict[str, Outcome]) -> str:
    """A row for each fault, then the sums of each subject."""
    rows = []
    for fault in some:
        of = outcomes[fault.name]
        rows.append(f"{fault.subject:10} {of.seconds:5.0f} s {of.tier:5} {fault.name}")
        rows += [f"{'':25}{test}" for test in of.by or [of.state.upper()]]
    for subject in dict.fromkeys(fault.subject for fault in some):
        own = [outcomes[fault.name] for fault in some if fault.subject == subject]
        tiers = {tier: sum(o.tier == tier for o in own) for tier in ("quick", "slow", "whole")}
        counts = ", ".join(f"{count} {tier}" for tier, count in tiers.items())
        rows.append(f"{subject:10} {sum(tiers.values())} of {len(own)} found: {counts}")
    return "\n".join(rows)


def main() -> int:
    """The exit code: 1 if a fault is not found or stale."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("names", nargs="*", help="subjects, or names of faults")
    about = "of which faults slow tests run; rest: of those that no quick one finds"
    parser.add_argument("--slow", choices=("none", "rest", "all"), default="rest", help=about)
    parser.add_argument("--whole", action="store_true", help="try the whole quick tier at the end")
    parser.add_argument("--json", type=Path, default=os.devnull, help="keeps the outcomes")
    options = parser.parse_args()
    some = [f for f in faults() if not options.names or {f.name, f.subject} & {*options.names}]
    kept = json.loads((options.json.exists() and options.json.read_text()) or "{}")
    outcomes = {name: Outcome(**values) for name, values in kept.items()}
    left, begin = [fault for fault in some if fault.name not in outcomes], time.monotonic()
    for number, fault in enumerate(left, 1):
        outcomes[fault.name] = tried(fault, options.slow)
        options.json.write_text(json.dumps(outcomes, default=asdict, indent=1))
        rest = (time.monotonic() - begin) / number * (len(left) - number) / 60
        print(f"{outcomes[fault.name].state:9} {fault.name}; {rest:.0f} minutes left", flush=True)
    missed = [f for f in some if outcomes[f.name].state in ("not found", "too slow")]
    if options.whole and missed:
        outcomes |= tried_by_all(missed)
        options.json.write_text(json.dumps(outcomes, default=asdict, indent=1))
    print(table(some, outcomes))
    return any(outcomes[fault.name].state != "found" for fault in some)


if __name__ == "__main__":
    sys.exit(main())
