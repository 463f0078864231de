"""Environment of a run: versions, hardware, state of the code."""

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainyard.installation import VERSION
from trainyard.world import usable_cores

_PACKAGES = ("torch", "timm", "numpy", "pillow", "safetensors")


def describe_environment() -> dict[str, Any]:
    """Versions, hardware and git state, for environment.json."""
    import torch

    devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return {
        "command": sys.argv,
        "host": platform.node(),
        "python": platform.python_version(),
        "versions": versions(),
        "cpus": usable_cores(),
        "devices": devices,
        "git": _git_state(),
        "startup_s": _startup_s(),
    }


def _startup_s() -> float | None:
    """Seconds since this process began; None where there is no /proc (proc_pid_stat(5))."""
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return None
    ticks = int(stat.rpartition(")")[2].split()[19])  # field 22, from the boot of the machine
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def versions() -> dict[str, str | None]:
    """Versions of Trainyard and of packages that affect its results; None if not installed."""
    return {"trainyard": VERSION, **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of Trainyard's checkout, and whether it was altered; None outside a checkout.

    An installed package may lie in another repository, such as the user's with its `.venv`.
    """
    folder = Path(__file__).parents[2]
    try:
        if not folder.samefile(_git(folder, "rev-parse", "--show-toplevel")):
            return None
        commit = _git(folder, "rev-parse", "HEAD")
        return {"commit": commit, "altered": bool(_git(folder, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return result.stdout.strip()
