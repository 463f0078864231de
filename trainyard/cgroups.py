"""Limits of the control groups of this process: the container's, the job's, the user's.

See cgroups(7). Version 1 has a tree for each controller.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")


def groups(controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those above it, each of which may have a limit.

    A container without a namespace of its own sees its group at the root.
    """
    for line in PROC_CGROUP.read_text().splitlines() if PROC_CGROUP.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUP / controller if controllers else CGROUP
        for group in (leaf := Path(os.path.normpath(path)), *leaf.parents):
            yield root / group.relative_to("/")


def value(group: Path, *names: str) -> str:
    """The content of the first of these files that a group has; "" if it has none."""
    for name in names:
        with suppress(OSError):
            return (group / name).read_text().strip()
    return ""


def cpu_quotas() -> dict[int, float]:
    """Cores that each limited group may use, by the number of its folder, which the kernel gives.

    A group's number is the same in all containers.
    """
    quotas = {}
    for group in groups("cpu"):
        quota, *period = (value(group, "cpu.max", "cpu.cfs_quota_us") or "max").split()
        if quota not in ("max", "-1"):
            each = period[0] if period else value(group, "cpu.cfs_period_us") or "100000"
            quotas[group.stat().st_ino] = float(quota) / float(each)
    return quotas
