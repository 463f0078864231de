"""The bottleneck of a run - data, device or other ranks - judged from measurements."""

from typing import NamedTuple

from trainyard.monitor.reports import Report

_ALL = 0.9  # share of time from which a part counts as the bottleneck on its own
_NOTABLE = 0.1  # share of time below which a part is no bottleneck
_SPARE = 1.25  # loader speed over demand from which a wait is not the loader's fault

LOADER_ADVICE = "see `trainyard bench loader`"
RANKS_ADVICE = "a larger batch.size, average.compress or gossip send less (docs/averaging.md)"
HOST_ADVICE = "does something else use the trainer's cores?"


class Measured(NamedTuple):
    """Images per second of all ranks, over an interval of training."""

    real: float
    device: float | None
    """Speed of all devices with batches at hand and without waiting for each other. None if that
    cannot be tried, because a forward pass waits for other ranks."""
    data: float | None
    """Speed of the loaders if they never waited for the trainer; None if not known."""
    data_wait: float
    """Share of the time spent waiting for data."""
    ranks: int = 1

    @property
    def idle(self) -> float:
        """Speed that the devices could reach, over the real speed."""
        assert self.device is not None
        return self.device / self.real


class Judgement(NamedTuple):
    bound: str
    """"data", "device" or "ranks"; "host" for a single rank bound by neither data nor device;
    "device or ranks" if they cannot be told apart."""
    head_room: float | None
    """Speed-up without the bottleneck, as far as the next one allows."""
    message: str


def judge(found: Measured, device_advice: str = "") -> Judgement:
    """Find the bottleneck of a run from the share of time of each part; adds advice.

    A wait for data counts for the device if the loader is much faster than needed: the wait is then
    for copies and augmentation of whole batches, which share the device with the steps.
    """
    has_spare = found.data is not None and found.data >= _SPARE * found.real
    if found.device is None:
        is_data = found.data_wait >= _NOTABLE and not has_spare
        return _by_data(found) if is_data else _not_data(found)
    steps = found.real / found.device
    rest = 1 - steps - found.data_wait
    if steps >= _ALL or max(found.data_wait, rest) < _NOTABLE:
        return _by_device(found, device_advice)
    if found.data_wait >= rest:
        return _by_preparation(found) if has_spare else _by_data(found)
    return _by_ranks(found) if found.ranks > 1 else _by_host(found)


def as_event(found: Measured, judgement: Judgement) -> Report:
    """A judgement as an event of metrics.jsonl."""
    return {
        "kind": "event",
        "event": "bounds",
        "message": judgement.message,
        "bound": judgement.bound,
        "head_room": judgement.head_room,
        **found._asdict(),
    }


def _by_data(found: Measured) -> Judgement:
    said = f"data bounds this run: {found.real:,.0f} images/s come, "
    if found.device is None:
        room = 1 / max(1 - found.data_wait, 0.01)
        said += f"and {found.data_wait:.0%} of the time goes into waiting for them ({room:.1f}x)"
    else:
        room = found.idle
        said += f"{_the_device(found)} could take {found.device:,.0f} ({room:.1f}x)"
    return Judgement("data", room, f"{said}; {LOADER_ADVICE}")


def _by_device(found: Measured, advice: str) -> Judgement:
    assert found.device is not None
    said = f"the device bounds this run: {found.real:,.0f} images/s, "
    if found.real > 0.97 * found.device:
        said += "all that it can take"
    else:
        said += f"of {found.device:,.0f} that it can take"
    room = None if found.data is None else found.data / found.real
    if room is not None:
        said += f"; the loader could make {found.data:,.0f} ({room:.1f}x)"
    return Judgement("device", room, f"{said}; {advice}" if advice else said)


def _by_preparation(found: Measured) -> Judgement:
    room = found.idle
    said = (
        f"the device bounds this run: {found.real:,.0f} images/s of the {found.device:,.0f} "
        f"({room:.1f}x) that it can take if batches are ready; {found.data_wait:.0%} of the time "
        f"goes into making them so (copies, augment.*), not into the loader, which could make "
        f"{found.data:,.0f}"
    )
    return Judgement("device", room, said)


def _by_ranks(found: Measured) -> Judgement:
    room = found.idle
    said = (
        f"the other ranks bound this run: {found.real:,.0f} images/s, the devices could take "
        f"{found.device:,.0f} ({room:.1f}x) if they did not wait for each other"
    )
    return Judgement("ranks", room, f"{said}; {RANKS_ADVICE}")


def _by_host(found: Measured) -> Judgement:
    room = found.idle
    said = (
        f"neither data nor device bounds this run: {found.real:,.0f} images/s, the device "
        f"alone could take {found.device:,.0f} ({room:.1f}x)"
    )
    return Judgement("host", room, f"{said}; {HOST_ADVICE}")


def _not_data(found: Measured) -> Judgement:
    said = (
        f"data does not bound this run: {found.real:,.0f} images/s, {found.data_wait:.0%} of the "
        "time goes into waiting for them; device and other ranks cannot be told apart where ranks "
        "wait for each other inside the model"
    )
    return Judgement("device or ranks", None, said)


def _the_device(found: Measured) -> str:
    return "the device" if found.ranks == 1 else "the devices"
