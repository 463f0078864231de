"""The order of the doctor's checks, and the conditions under which some are left out."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from rich.console import Console

from trainyard.data.index.table import Index
from trainyard.data.open_datasets import Datasets, open_datasets
from trainyard.distributed import init_distributed
from trainyard.distributed.heartbeat import Heartbeat
from trainyard.doctor.folders import folders, seen_by_all
from trainyard.doctor.machine import MACHINE
from trainyard.doctor.network import between_machines, clocks, devices, exchanges
from trainyard.doctor.patient import Patient, Question, meet
from trainyard.doctor.reading import other_fingerprints, own_fingerprints, reading, same_samples
from trainyard.doctor.rows import FAIL, OK, WARN, Row, ask, differing
from trainyard.errors import TrainyardError
from trainyard.monitor.progress import counter
from trainyard.world import World, gather, in_turns, pick_device

_ONE_RANK = (
    "the network: this is one rank; start the doctor as a run is started, by `trainyard launch … "
    "--doctor`, torchrun or srun"
)
_ONE_MACHINE = "links and clocks between machines: this is one"
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


def examine(question: Question, world: World, console: Console) -> Findings:
    """The joint findings of all ranks, the same on each; all ranks call it.

    PeerError or InputError if the ranks do not meet.
    """
    with init_distributed(world, _facts(question)) as watchdog:
        watchdog.begin(_SILENCE_S)
        return examine_joined(question, world, console, watchdog.heartbeat)


def examine_joined(
    question: Question, world: World, console: Console, heartbeat: Heartbeat
) -> Findings:
    """Like `examine`, for ranks that have met already."""
    with console.status("") as status:

        def say(what: str) -> None:
            heartbeat.mark(what)
            status.update(what)

        patient = meet(question, world, pick_device(world), say)
        rows = list(_rows(patient, console, heartbeat))
    return Findings(rows, _left_out(patient), world.size, len(patient.leaders))


def _facts(question: Question) -> dict[str, str]:
    """Settings that must be equal on all ranks, so that they run the same checks."""
    data = question.config.data
    return {
        "data.train": f"{data.train}",
        "data.val": f"{data.val}",
        "the run directory": f"{question.run}",
        "seconds": f"{question.seconds}",
    }


def _rows(patient: Patient, console: Console, heartbeat: Heartbeat) -> Iterator[Row]:
    for check in (*MACHINE, *folders(patient)):
        patient.say(check.what)
        yield ask(check, patient)
    if patient.world.size > 1:
        yield seen_by_all(patient)
        yield from _network_rows(patient)
    if _has_data(patient):
        yield from _data_rows(patient, console, heartbeat)


def _network_rows(patient: Patient) -> Iterator[Row]:
    for check in exchanges(patient):
        patient.say(check.what)
        yield ask(check, patient)
    if len(patient.leaders) > 1:
        patient.say("clocks")
        yield clocks(patient)
        for device in devices(patient):
            yield between_machines(patient, device)


def _data_rows(patient: Patient, console: Console, heartbeat: Heartbeat) -> Iterator[Row]:
    config, world = patient.question.config.data, patient.world
    patient.say("data")
    try:
        with counter(console, "indexing samples") as show:
            progress = heartbeat.counted("indexing", show)
            own = in_turns(world, partial(own_fingerprints, config, patient.leads, progress))
            others = other_fingerprints(gather(world, own))
            if others:
                advice = "copy the data there anew, or mount the same file system everywhere"
                yield Row("data", differing(others, patient), FAIL, advice)
                return
            data = open_datasets(config, world, progress)
    except TrainyardError as error:  # on all ranks
        yield Row("data", str(error), FAIL, "see the message")
        return
    yield Row("data", _described(data))
    index = data.train if isinstance(data.train, Index) else data.val
    for check in (same_samples(index), reading(index)):
        patient.say(check.what)
        yield ask(check, patient)


def _described(data: Datasets) -> str:
    train = "a stream" if not isinstance(data.train, Index) else f"{len(data.train):,}"
    prints = ", ".join(f"{split} {print[:12]}" for split, print in data.fingerprints.items())
    return (
        f"the same for all ranks: {train} to train on, {len(data.val):,} to validate, "
        f"{len(data.val.classes):,} classes ({prints})"
    )


def _has_data(patient: Patient) -> bool:
    return patient.question.config.data.train is not None


def _left_out(patient: Patient) -> list[str]:
    of_network = _ONE_RANK if patient.world.size == 1 else _ONE_MACHINE
    return [of_network] * (len(patient.leaders) == 1) + [_NO_DATA] * (not _has_data(patient))
