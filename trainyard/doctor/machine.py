"""Checks of each rank's machine: versions, GPUs, cores, memory, limits."""

import os
import platform
import re
import resource
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from trainyard.distributed.process_group import FILES_PER_RANK, OWN_FILES
from trainyard.doctor.patient import Patient
from trainyard.doctor.rows import FAIL, WARN, Check, Row, differing, spread
from trainyard.monitor.environment import versions
from trainyard.monitor.units import in_bytes, in_seconds
from trainyard.world import cores_per_rank

_SLOW_IMPORT_S = 20
_SLOW_NAME_S = 1
_FEW_CORES = 2  # per rank: one trains, one decodes
_LITTLE_MEMORY = 4e9  # bytes per rank
_TOO_LITTLE_MEMORY = 1e9
_LITTLE_SHARED = 1e9  # bytes; Docker gives 64 MB
_PROBE = 1 << 20  # bytes
_CGROUP = Path("/sys/fs/cgroup")


# --- versions ---


def _versions(patient: Patient) -> dict[str, str]:
    found = {"python": platform.python_version()} | versions()
    return {name: f"{version}" for name, version in found.items() if version is not None}


def _judge_versions(values: list[dict[str, str]], patient: Patient) -> Row:
    first = values[0]
    others = {
        rank: ", ".join(
            f"{name} {mine.get(name, 'missing')}"
            for name in first | mine
            if mine.get(name) != first.get(name)
        )
        for rank, mine in enumerate(values)
        if mine != first
    }
    known = ", ".join(f"{name} {first[name]}" for name in ("trainyard", "python", "torch", "timm"))
    if others:
        advice = "install the same versions on every machine, from requirements.lock say"
        return Row("versions", f"{known}; {differing(others, patient)}", FAIL, advice)
    return Row("versions", known)


def _judge_import(values: list[float], patient: Patient) -> Row:
    row = Row("time to import torch", spread(values, patient.names, in_seconds, "most"))
    if max(values) > _SLOW_IMPORT_S:
        advice = (
            "the environment seems to lie on a slow network file system: put it into a container "
            "image or onto a local disk; every start takes this long"
        )
        return row._replace(verdict=WARN, advice=advice)
    return row


# --- devices ---


class _Gpu(NamedTuple):
    name: str
    memory: int  # bytes
    driver: str
    nccl: str


def _gpu(patient: Patient) -> _Gpu | None:
    import torch

    if patient.device.type == "cpu":
        return None
    properties = torch.cuda.get_device_properties(patient.device)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return _Gpu(properties.name, properties.total_memory, _driver(), nccl)


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.partition("\n")[0].strip()


def _judge_gpus(values: list[_Gpu | None], patient: Patient) -> Row:
    gpus = {rank: gpu for rank, gpu in enumerate(values) if gpu is not None}
    if not gpus:
        return Row("GPUs", "none: the ranks of a machine share its cores")
    if len(gpus) < len(values):
        without = {rank: "no GPU" for rank in range(len(values)) if rank not in gpus}
        advice = "look at nvidia-smi there, and at what the scheduler was asked for"
        return Row("GPUs", differing(without, patient), FAIL, advice)
    kinds = {
        rank: f"{gpu.name} of {in_bytes(gpu.memory)}, driver {gpu.driver}, NCCL {gpu.nccl}"
        for rank, gpu in gpus.items()
    }
    if not patient.has_own_gpus:
        advice = "start as many ranks on a machine as it has GPUs: NCCL needs one for each"
        return Row("GPUs", f"several ranks share one: {kinds[0]}", FAIL, advice)
    others = {rank: kind for rank, kind in kinds.items() if kind != kinds[0]}
    if others:
        advice = "the slowest sets the pace: ask the scheduler for one kind; one driver everywhere"
        return Row("GPUs", f"{kinds[0]}; {differing(others, patient)}", WARN, advice)
    return Row("GPUs", f"{len(gpus)} x {kinds[0]}")


# --- cores and memory ---


def _cores(patient: Patient) -> float:
    """Cores for this rank: its share of the machine's, or of a container's quota."""
    cores = float(cores_per_rank(patient.world))
    quota, period = [*_read("cpu.max", "cpu/cpu.cfs_quota_us", "max").split(), "100000"][:2]
    if quota in ("max", "-1"):
        return cores
    return min(cores, float(quota) / float(period) / patient.world.local_size)


def _judge_cores(values: list[float], patient: Patient) -> Row:
    row = Row("cores of a rank", spread(values, patient.names, lambda count: f"{count:g}", "least"))
    if min(values) < _FEW_CORES:
        advice = (
            "images are decoded on these: give each rank more (--cpus-per-task under Slurm, "
            "--cpus of the container), or start fewer ranks on a machine"
        )
        return row._replace(verdict=WARN, advice=advice)
    return row


def _memory(patient: Patient) -> float:
    """Free bytes of the machine, or of the container, per rank.

    The page cache counts as free.
    """
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = 1024 * int(lines["MemAvailable"].split()[0])
    limit = _read("memory.max", "memory/memory.limit_in_bytes", "max")
    if limit != "max":
        used = int(_read("memory.current", "memory/memory.usage_in_bytes", "0"))
        said = _read("memory.stat", "memory/memory.stat", "")
        cached = re.search(r"^(?:total_)?inactive_file (\d+)", said, re.MULTILINE)
        free = min(free, int(limit) - used + (int(cached[1]) if cached else 0))
    return free / patient.world.local_size


def _read(name: str, older: str, default: str) -> str:
    """A limit of this process's container; see cgroups(7), versions 2 and 1."""
    for path in (_CGROUP / name, _CGROUP / older):
        if path.exists():
            return path.read_text().strip()
    return default


def _judge_memory(values: list[float], patient: Patient) -> Row:
    row = Row("free memory of a rank", spread(values, patient.names, in_bytes, "least"))
    if min(values) < _LITTLE_MEMORY:
        verdict = FAIL if min(values) < _TOO_LITTLE_MEMORY else WARN
        advice = "ask the scheduler for more (--mem under Slurm), or start fewer ranks on a machine"
        return row._replace(verdict=verdict, advice=advice)
    return row


def _shared(patient: Patient) -> float:
    """Bytes free in /dev/shm. OSError if memory cannot be shared between processes."""
    probe = os.memfd_create("trainyard-doctor")
    try:
        os.posix_fallocate(probe, 0, _PROBE)
    finally:
        os.close(probe)
    found = os.statvfs("/dev/shm")
    return float(found.f_bavail * found.f_frsize)


def _judge_shared(values: list[float], patient: Patient) -> Row:
    row = Row("shared memory", spread(values, patient.names, in_bytes, "least"))
    if patient.device.type != "cpu" and min(values) < _LITTLE_SHARED:
        advice = "NCCL needs more: start the container with --shm-size 8g, or --ipc=host"
        return row._replace(verdict=WARN, advice=advice)
    return row


# --- limits ---


def _open_files(patient: Patient) -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _judge_open_files(values: list[tuple[int, int]], patient: Patient) -> Row:
    least = OWN_FILES + FILES_PER_RANK * patient.world.size
    soft, hard = min(values)
    found = spread([each for each, _ in values], patient.names, lambda count: f"{count:g}", "least")
    row = Row("open files allowed", found)
    if soft < least:
        more = max(4096, least)
        how = f"`ulimit -n {more}` before the start"
        if hard < more:
            how += f", once {hard} is no longer the hard limit (limits.conf, LimitNOFILE, --ulimit)"
        return row._replace(verdict=FAIL, advice=f"at least {least} are needed: {how}")
    return row


def _own_name(patient: Patient) -> float | str:
    """Seconds to resolve this machine's own name, or an error text."""
    begun = time.perf_counter()
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        return f"{socket.gethostname()} does not ({error.strerror})"
    return time.perf_counter() - begun


def _judge_own_name(values: list[float | str], patient: Patient) -> Row:
    """A warning at most: Trainyard uses addresses."""
    unknown = {rank: value for rank, value in enumerate(values) if isinstance(value, str)}
    if unknown:
        advice = "add it to /etc/hosts there: other tools need it"
        return Row("own name resolves", differing(unknown, patient), WARN, advice)
    times = [value for value in values if not isinstance(value, str)]
    row = Row("own name resolves", spread(times, patient.names, in_seconds, "most"))
    if max(times) > _SLOW_NAME_S:
        return row._replace(verdict=WARN, advice="a name server is slow: see /etc/resolv.conf")
    return row


MACHINE = (
    Check("versions", _versions, _judge_versions),
    Check("time to import torch", lambda patient: patient.question.import_seconds, _judge_import),
    Check("GPUs", _gpu, _judge_gpus, "see nvidia-smi there"),
    Check("cores of a rank", _cores, _judge_cores),
    Check("free memory of a rank", _memory, _judge_memory),
    Check("shared memory", _shared, _judge_shared, "mount /dev/shm; permit memfd_create"),
    Check("open files allowed", _open_files, _judge_open_files),
    Check("own name resolves", _own_name, _judge_own_name),
)
