"""Checks of each rank's machine: GPUs, cores, memory, limits, disks."""

import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

import torch

from trainyard.cgroups import cpu_quotas, groups, value
from trainyard.distributed.process_group import FILES_PER_RANK, OWN_FILES
from trainyard.doctor.check import FAIL, WARN, Check, Context, Options, Row, differing, limit_check
from trainyard.estimate.memory import checkpoint_bytes, model_sizes
from trainyard.files import cache_folder
from trainyard.printable import in_bytes, in_seconds
from trainyard.run.model import build_run_model
from trainyard.world import cores_per_rank

_FEW_CORES = 2  # per rank: one trains, one decodes
_LITTLE_MEMORY, _TOO_LITTLE_MEMORY = 4e9, 1e9  # bytes per rank
_LITTLE_SHARED = 1e9  # bytes, for NCCL; Docker gives 64 MB
_LITTLE_SPACE, _TOO_LITTLE_SPACE = 2e9, 1e8  # bytes, for a cache or temporary files
_SLOW_WRITE = 50e6  # bytes per second
_BLOCK = 1 << 24  # bytes written at a time
_LARGEST_WRITE = 1 << 28
_UNKNOWN_CHECKPOINT = 1 << 30


def machine_checks(context: Context) -> list[Check]:
    """The checks of each machine: GPUs, cores, memory and limits."""
    return [
        Check("GPUs", _gpu, _judge_gpus, "look at nvidia-smi there"),
        limit_check(
            "cores of a rank",
            _cores,
            _count,
            warn=_FEW_CORES,
            advice="images are decoded on these: give each rank more (--cpus-per-task under Slurm, "
            "--cpus of the container), or start fewer ranks on a machine",
        ),
        limit_check(
            "free memory of a rank",
            _memory,
            in_bytes,
            warn=_LITTLE_MEMORY,
            fail=_TOO_LITTLE_MEMORY,
            advice="request more of the scheduler (--mem under Slurm), or start fewer ranks on a "
            "machine",
        ),
        *_limits(context),
    ]


def _limits(context: Context) -> list[Check]:
    files = OWN_FILES + FILES_PER_RANK * context.world.size
    return [
        limit_check(
            "shared memory",
            lambda _: _free(Path("/dev/shm")),
            in_bytes,
            warn=0 if context.device.type == "cpu" else _LITTLE_SHARED,
            advice="NCCL needs more: start the container with --shm-size 8g, or --ipc=host",
        ),
        limit_check(
            "open files allowed",
            lambda _: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            _count,
            warn=files,
            fail=files,
            advice=f"at least {files} are needed: `ulimit -n {max(4096, files)}` before the start; "
            "a lower hard limit is raised by limits.conf, LimitNOFILE, or docker's --ulimit",
        ),
    ]


def _count(number: float) -> str:
    return f"{number:,g}"


# --- GPUs ---


def _gpu(context: Context) -> str:
    """Kind of GPU, with its driver; "" for the CPU."""
    if context.device.type == "cpu":
        return ""
    properties = torch.cuda.get_device_properties(context.device)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    memory = in_bytes(properties.total_memory)
    return f"{properties.name} of {memory}, driver {_driver()}, NCCL {nccl}"


def _driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return "unknown"


def _judge_gpus(values: list[str], context: Context) -> Row:
    first = next(filter(None, values), "")
    if not first:
        return Row("GPUs", "none: the ranks of a machine share its cores")
    others = {rank: kind or "no GPU" for rank, kind in enumerate(values) if kind != first}
    if "" in values:
        advice = "look at nvidia-smi there, and at what was requested of the scheduler"
        return Row("GPUs", f"{first}; {differing(others, context)}", FAIL, advice)
    if not context.has_own_gpus:
        advice = "start as many ranks on a machine as it has GPUs: NCCL needs one for each"
        return Row("GPUs", f"several ranks share one: {first}", FAIL, advice)
    if others:
        advice = "the slowest sets the pace: request one kind, and install one driver everywhere"
        return Row("GPUs", f"{first}; {differing(others, context)}", WARN, advice)
    return Row("GPUs", f"{len(values)} x {first}")


# --- cores and memory ---


def _cores(context: Context) -> float:
    """Cores for this rank: its share of the machine's, or of the quota of its job or container."""
    shares = [quota / context.world.local_size for quota in cpu_quotas().values()]
    return min([cores_per_rank(context.world), *shares])


def _memory(context: Context) -> float:
    """Free bytes of the machine, or of the job or container, per rank.

    The page cache counts as free.
    """
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = 1024 * int(lines["MemAvailable"].split()[0])
    for group in groups("memory"):
        limit = value(group, "memory.max", "memory.limit_in_bytes") or "max"
        if limit != "max":
            used = int(value(group, "memory.current", "memory.usage_in_bytes") or 0)
            kinds = dict(line.split() for line in value(group, "memory.stat").splitlines())
            cached = kinds.get("total_inactive_file", kinds.get("inactive_file", 0))
            free = min(free, int(limit) - used + int(cached))
    return free / context.world.local_size


# --- disks ---


def disk_checks(context: Context) -> list[Check]:
    """Checks of the run directory and of two folders whose lack of space would end a run."""
    run, keep = context.options.run, context.options.config.run.keep
    size = _checkpoint_bytes(context.options)
    temporary = Path(tempfile.gettempdir())
    advice = "choose another directory with --run, or make this one writable"
    return [
        Check("writing checkpoints", _write, _judge_write, advice),
        _space("space for the run", run, 2 * size, (keep + 2) * size),
        _space("space for caches", cache_folder(), _TOO_LITTLE_SPACE, _LITTLE_SPACE),
        _space("space for temporary files", temporary, _TOO_LITTLE_SPACE, _LITTLE_SPACE),
    ]


def _space(what: str, folder: Path, least: float, enough: float) -> Check:
    return limit_check(
        what,
        lambda _: _free(existing(folder)),
        in_bytes,
        warn=enough,
        fail=least,
        advice=f"make room for {in_bytes(enough)}",
        where=f" in {existing(folder)}",
    )


def existing(folder: Path) -> Path:
    """A folder, or its nearest parent that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _free(folder: Path) -> float:
    return float(shutil.disk_usage(folder).free)


def _write(context: Context) -> float | None:
    """Bytes per second of a synced write of the size of a checkpoint; None on other ranks."""
    if not context.world.is_first:
        return None
    size = min(_checkpoint_bytes(context.options), _LARGEST_WRITE)
    block = os.urandom(_BLOCK)
    deadline = time.perf_counter() + 10 * context.options.seconds
    with tempfile.TemporaryFile(dir=existing(context.options.run), buffering=0) as file:
        started, written = time.perf_counter(), 0
        while written < size and time.perf_counter() < deadline:
            written += file.write(block[: size - written])
        os.fsync(file.fileno())
    return written / (time.perf_counter() - started)


def _judge_write(values: list[float], context: Context) -> Row:
    speed = values[0]
    text = f"{in_bytes(speed)}/s in {existing(context.options.run)}"
    if context.options.has_recipe:
        size = _checkpoint_bytes(context.options)
        text += f": a checkpoint of {in_bytes(size)} takes {in_seconds(size / speed)}"
    if speed < _SLOW_WRITE:
        advice = "training waits for it: choose a faster disk with --run, or save less often"
        return Row("writing checkpoints", text, WARN, advice)
    return Row("writing checkpoints", text)


def _checkpoint_bytes(options: Options) -> int:
    """Size of a checkpoint of the recipe's model with 1000 classes, by the estimate's formula."""
    if not options.has_recipe:
        return _UNKNOWN_CHECKPOINT
    with torch.device("meta"):
        model = build_run_model(options.config, num_classes=1000)
    sizes = model_sizes(model, options.config)
    return int(checkpoint_bytes(sizes, options.config.average, ranks=1))
