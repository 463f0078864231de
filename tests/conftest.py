"""Data sets and recipes that several tests share."""

import os
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests import tiers

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does, before torch
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all of Trainyard

from tests import loaders
from tests.command_line import SHORT, run
from trainyard.config import RunConfig, load_recipe
from trainyard.datasets.prepare.digits import prepare_digits

# Both are ignored under nohup, and in the background of a script, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
loaders.install()

FORBIDDEN = ("no namespaces of its own", "no GPU at hand")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test that would be skipped, because a service is missing say, fails.

    What a machine forbids even to root, or lacks, cannot be installed.
    """
    report = yield
    if (
        report.skipped
        and "CI" in os.environ
        and not any(reason in report.longreprtext for reason in FORBIDDEN)
    ):
        report.outcome = "failed"
        report.longrepr = f"not to be skipped in CI: {report.longreprtext}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Processor seconds of a test and of what it waited for, for build/tests: load changes them
    little, and a start of Python stands out.
    """
    before = os.times()
    try:
        return (yield)
    finally:
        spent = sum(os.times()[:4]) - sum(before[:4])
        item.user_properties.append(("processor", round(spent, 3)))


@pytest.hookimpl(trylast=True)  # those of other tiers are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_parts = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = tiers.in_parts(items, num_parts)


@pytest.fixture(autouse=True)
def _same_variables() -> Iterator[None]:
    """Takes back what a test and the product have set: later tests start processes with it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The handwritten digits as an image folder with train and val. Not to be written to."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    prepare_digits(folder)
    return folder


@pytest.fixture(scope="session")
def listed_digits(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of the digits, whose labels are the digit and "even" or "odd"; nines have none.

    Not to be written to, nor the folder that it is in.
    """
    folder = tmp_path_factory.mktemp("lists") / "digits"
    shutil.copytree(digits, folder)
    rows = ["path,labels,split"]
    for path in sorted(folder.glob("*/*/*.png")):
        digit = path.parent.name
        labels = "" if digit == "9" else f"{digit}|{('even', 'odd')[int(digit) % 2]}"
        rows.append(f"{path.relative_to(folder)},{labels},{path.parts[-3]}")
    (folder / "list.csv").write_text("\n".join(rows) + "\n")
    return folder / "list.csv"


@pytest.fixture
def debug_recipe(digits: Path) -> RunConfig:
    """The debug recipe (a tiny transformer, no batch norm) on the digits."""
    return load_recipe(
        "debug", {"data.train": str(digits / "train"), "data.val": str(digits / "val")}
    )


@pytest.fixture(scope="session")
def finished(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of two steps of the debug recipe. Not to be written to."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run("train", "debug", "--data", digits, "--run", folder, *SHORT, "--json") == 0
    return folder


@pytest.fixture(scope="session")
def averaged(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with batch norm, a moving average, and validation images that are cropped and resized.

    Not to be written to.
    """
    folder = tmp_path_factory.mktemp("averaged") / "run"
    where = ("--data", digits, "--run", folder, "--model.ema_decay", "0.9", "--data.threads", "1")
    sizes = ("--batch.size", "48", "--data.eval_size", "40", "--data.crop_pct", "0.8")
    length = ("--run.length", "16 steps", "--schedule.warmup", "0 steps")
    assert run("train", "digits", *where, *sizes, *length, "--json") == 0
    return folder


SOME = "137"


@pytest.fixture(scope="session")
def some(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The validation images of three of the ten classes."""
    folder = tmp_path_factory.mktemp("some")
    for name in SOME:
        (folder / name).symlink_to(digits / "val" / name)
    return folder
