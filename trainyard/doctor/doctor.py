"""The order of the doctor's checks, and the conditions under which some are left out."""

import platform
from typing import NamedTuple

from rich.console import Console

from trainyard.distributed import init_distributed
from trainyard.distributed.heartbeat import Heartbeat
from trainyard.doctor.check import FAIL, OK, WARN, Context, Options, Row, collect_context, run_check
from trainyard.doctor.data import data_rows
from trainyard.doctor.machine import disk_checks, machine_checks
from trainyard.doctor.network import network_checks
from trainyard.run.resume import startup_facts
from trainyard.world import World, pick_device, with_cores

_ONE_RANK = (
    "the network: this is one rank; start the doctor as a run is started, by `trainyard launch … "
    "--doctor`, torchrun or srun"
)
_ONE_MACHINE = "links between machines: this is one"
_NO_DATA = "the data: name a RECIPE that has some, or --data LOCATION"
_SILENCE_S = 75  # for one check; the watchdog allows a first step four times as long


class Findings(NamedTuple):
    rows: list[Row]
    left_out: list[str]
    num_ranks: int
    num_machines: int

    @property
    def verdict(self) -> str:
        """The worst verdict of all rows."""
        verdicts = {row.verdict for row in self.rows}
        return next(each for each in (FAIL, WARN, OK) if each in verdicts)


def examine(options: Options, world: World, console: Console) -> Findings:
    """The joint findings of all ranks, the same on each; all ranks call it.

    PeerError or InputError if the ranks do not meet.
    """
    data = options.config.data
    same_on_all = {
        **startup_facts(options.config),
        "python": platform.python_version(),
        "data.train": f"{data.train}",
        "data.val": f"{data.val}",
        "the run directory": f"{options.run}",
        "seconds": f"{options.seconds}",
    }
    with init_distributed(world, same_on_all) as watchdog:
        watchdog.begin(_SILENCE_S)
        return examine_joined(options, with_cores(world), console, watchdog.heartbeat)


def examine_joined(
    options: Options, world: World, console: Console, heartbeat: Heartbeat
) -> Findings:
    """Like `examine`, for ranks that have met already."""
    with console.status("") as status:

        def show(what: str) -> None:
            heartbeat.mark(what)
            status.update(what)

        context = collect_context(options, world, pick_device(world), show)
        checks = [*machine_checks(context), *disk_checks(context)]
        checks += network_checks(context) if world.size > 1 else []
        rows = [run_check(check, context) for check in checks]
        has_data = options.config.data.train is not None
        if has_data:
            rows += data_rows(context, console, heartbeat)
    return Findings(rows, _left_out(context, has_data), world.size, len(context.machines))


def _left_out(context: Context, has_data: bool) -> list[str]:
    of_network = _ONE_RANK if context.world.size == 1 else _ONE_MACHINE
    return [of_network] * (len(context.machines) == 1) + [_NO_DATA] * (not has_data)
