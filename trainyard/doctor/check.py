"""Checks: a measurement on each rank, and one judgement of all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainyard.distributed.process_info import ProcessInfo
from trainyard.errors import TrainyardError
from trainyard.world import World, gather, gpu_of

if TYPE_CHECKING:
    import torch

    from trainyard.config import RunConfig

OK, WARN, FAIL = "ok", "warn", "fail"
_NAMED = 3  # ranks that a row names; others are counted


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of the doctor, the same on every rank."""

    config: "RunConfig"
    run: Path
    has_recipe: bool
    """True if a recipe was given: its model then sets the size of a checkpoint."""
    seconds: float
    """Seconds per measurement of speed."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """One rank's view of all ranks."""

    options: Options
    world: World
    device: "torch.device"
    has_own_gpus: bool
    """True if each rank has a GPU of its own, as NCCL requires."""
    names: Mapping[int, str]
    """Names of ranks: rank 3 (host)."""
    machines: Mapping[int, str]
    """Host name by a machine's first rank, with the rank if several machines have the same name."""
    show: Callable[[str], None]
    """Shows the current check."""


def collect_context(
    options: Options, world: World, device: "torch.device", show: Callable[[str], None]
) -> Context:
    """Collect the context; all ranks call it."""
    gpus = gather(world, gpu_of(device))
    nodes = gather(world, (ProcessInfo.current().host, world.node))
    leaders = sorted({nodes.index(each) for each in nodes})
    hosts = [nodes[rank][0] for rank in leaders]
    return Context(
        options=options,
        world=world,
        device=device,
        has_own_gpus=None not in gpus and len(set(gpus)) == world.size,
        names={rank: f"rank {rank} ({host})" for rank, (host, _) in enumerate(nodes)},
        machines={
            rank: host if hosts.count(host) == 1 else f"{host} (rank {rank})"
            for rank, host in zip(leaders, hosts, strict=True)
        },
        show=show,
    )


class Row(NamedTuple):
    """A row of the doctor's table."""

    what: str
    found: str
    verdict: str = OK
    advice: str = ""
    """Advice; empty for a row that is ok."""


class Check(NamedTuple):
    what: str
    measure: Callable[[Context], Any]
    judge: Callable[[list[Any], Context], Row]
    """Receives the value of every rank."""
    advice: str = ""
    """Advice if the measurement fails."""


def limit_check(
    what: str,
    measure: Callable[[Context], float],
    form: Callable[[float], str],
    *,
    advice: str,
    warn: float,
    fail: float | None = None,
    where: str = "",
) -> Check:
    """A check that a number of each rank is not below `warn` and `fail`.

    `form` writes the number, `where` follows it. The advice is also that of a measurement that
    fails.
    """

    def judge(values: list[float], context: Context) -> Row:
        worst = min(values)
        has_failed = fail is not None and worst < fail
        verdict = FAIL if has_failed else WARN if worst < warn else OK
        text = spread(values, context, form) + where
        return Row(what, text, verdict, "" if verdict == OK else advice)

    return Check(what, measure, judge, advice)


class _Problem(NamedTuple):
    """A rank's error in place of a value."""

    text: str


def run_check(check: Check, context: Context) -> Row:
    """Run a check. Returns its row, the same on every rank; all ranks call it."""
    context.show(check.what)
    try:
        value = check.measure(context)
    except (OSError, TrainyardError) as error:
        value = _Problem(str(error))
    values = gather(context.world, value)
    failed = {rank: each.text for rank, each in enumerate(values) if type(each) is _Problem}
    if failed:
        return Row(check.what, differing(failed, context), FAIL, check.advice)
    return check.judge(values, context)


def differing(texts: dict[int, str], context: Context) -> str:
    """Texts of some ranks: rank 3 (b): …; rank 4 (b): … and 2 more."""
    if context.world.size == 1:
        return texts[0]
    named = [f"{context.names[rank]}: {text}" for rank, text in texts.items()]
    more = len(named) - _NAMED
    return "; ".join(named[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def spread(
    values: Sequence[float],
    context: Context,
    form: Callable[[float], str],
) -> str:
    """Values of all ranks, the worst with its rank: 11.2 GB to 11.9 GB, least rank 3 (b)."""
    low, high = form(min(values)), form(max(values))
    if len(values) == 1:
        return low
    if low == high:
        return f"{low} each"
    return f"{low} to {high}, least {context.names[list(values).index(min(values))]}"
