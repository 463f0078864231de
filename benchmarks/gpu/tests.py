"""The tests of tests/gpu, and the tests of other folders that only run where there is a GPU."""

import os
import sys

import pytest

from benchmarks.gpu.findings import Findings, run_part

_FILES = ["tests/gpu"]
_NEED_A_GPU = ["tests/data/test_feed.py", "tests/data/device/test_gpu_decode.py"]
_OPTIONS = [
    "-p",
    "no:cacheprovider",
    "--override-ini",
    "filterwarnings=",
    "--timeout",
    "240",
    "-rf",
]


class _Log:
    """Notes each test that has ended, also if the others never do."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_end = report.when == "call" or report.outcome != "passed"
        if not is_end or (report.when == "teardown" and report.outcome == "passed"):
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if report.failed:
            row["why"] = report.longreprtext.strip().splitlines()[-1][:300]
        self._findings.add("Tests", row)


def measure(findings: Findings, dry: bool) -> None:
    # A dry run has two cores or so; on a GPU machine a test waits for the GPU a small part of its
    # time.
    processes = 2 if dry else min(6, len(os.sched_getaffinity(0)) // 2)
    files = _FILES if dry else [*_FILES, *_NEED_A_GPU]
    options = [*_OPTIONS, "--numprocesses", str(processes)]
    sys.stdout.flush()
    code = pytest.main([*files, *options], plugins=[_Log(findings)])
    if code:
        raise SystemExit(int(code))


if __name__ == "__main__":
    run_part(measure)
