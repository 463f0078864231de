"""The distribution of this package: its name, its version, and the commands that install it.

`trainyard` on the package index is another project's, with a package folder of the same name, and
ours is not there yet: what installs it anew takes a clone, or it would run a stranger's code.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from trainyard.errors import DataError

VERSION = "0.2.0"
DISTRIBUTION = "trainyard-images"
NEEDS_EXTENSION = (
    "install a C compiler and run `pip install --force-reinstall --no-deps --no-cache-dir .` in a "
    "clone of Trainyard"
)


def install_hint(extra: str) -> str:
    """The command that installs the packages of an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def needed(module: str, extra: str, name: str) -> Any:
    """A module of the packages of an extra, imported. DataError: `name` needs its package."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(
            "data.needs-package",
            "{name} needs {package}: {hint}",
            name=name,
            package=package,
            hint=install_hint(extra),
        ) from None


def remark_on_other_distribution() -> str | None:
    """A line on a distribution `trainyard` in the folder of this one; None without it.

    It may be the other project's, or Trainyard's from before its distribution was renamed. Either
    way both own files of one package folder. The name of a folder shows it, since to import
    importlib.metadata takes 30 ms.
    """
    folder = Path(__file__).parents[1]
    for other in folder.glob("trainyard-*.dist-info"):
        version = other.name.removeprefix("trainyard-").removesuffix(".dist-info")
        return (
            f"{folder} has the package 'trainyard' {version} too, which overwrites files of "
            f"{DISTRIBUTION}: pip uninstall trainyard {DISTRIBUTION}; then install Trainyard "
            "again, from a clone"
        )
    return None
