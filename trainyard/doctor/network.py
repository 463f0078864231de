"""Checks between ranks: exchanges of all, links between machines, clocks, the run directory."""

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from trainyard.doctor.check import FAIL, WARN, Check, Context, Row, differing
from trainyard.doctor.machine import existing
from trainyard.printable import in_bits, in_seconds
from trainyard.world import gather

_ROUND_TRIPS = 20
_SLOW_MESSAGE_S = 0.01
_REDUCED = {"cpu": 1 << 24, "cuda": 1 << 28}  # bytes at most
_RESNET50 = 4 * 25.6e6  # bytes of its gradients
_SLOW_LINK = 1e9 / 8  # bytes per second
_PROBE = 1 << 18  # bytes of a first message, whose time sets the size of the next
_SENT = {"cpu": 1 << 20, "cuda": 1 << 25}  # bytes of a message between two machines
_SLOW, _TOO_SLOW = 0.5, 0.1  # share of the fastest link's speed
_SKEW_S, _LARGE_SKEW_S = 0.5, 60.0
_SEEN_S = 5  # for another machine to see a new file: network file systems refresh now and then


def network_checks(context: Context) -> list[Check]:
    """Checks that all ranks run together."""
    devices = [torch.device("cpu")] + [context.device] * context.has_own_gpus
    exchanges = [
        Check("run directory", _sees_file, _judge_file),
        Check("messages", _message, _judge_message),
        *map(_averaging, devices),
    ]
    if len(context.machines) == 1:
        return exchanges
    return [*exchanges, Check("clocks", _clock, _judge_clocks), *map(_links, devices)]


# --- all ranks at once ---


def _message(context: Context) -> float:
    """Seconds per all-reduce of one number."""
    word = torch.zeros(1)
    dist.all_reduce(word)
    begun = time.perf_counter()
    for _ in range(_ROUND_TRIPS):
        dist.all_reduce(word)
    return (time.perf_counter() - begun) / _ROUND_TRIPS


def _judge_message(values: list[float], context: Context) -> Row:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "of the host's name")
    found = f"an agreement of all takes {in_seconds(max(values))} by the interface {interface}"
    if max(values) > _SLOW_MESSAGE_S:
        advice = "averaging seldom costs less here: average.name = 'periodic' or 'gossip'"
        return Row("messages", found, WARN, advice)
    return Row("messages", found)


def _averaging(device: torch.device) -> Check:
    what = f"averaging by {_backend(device)}"

    def judge(values: list[float], context: Context) -> Row:
        speed, size = min(values), context.world.size
        wire = 2 * (size - 1) / size * speed  # bytes that a ring sends and receives
        found = f"{in_bits(wire)} each way: ResNet-50 in {in_seconds(_RESNET50 / speed)}"
        if len(context.machines) > 1 and wire < _SLOW_LINK:
            advice = (
                "is this the fastest interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)? "
                f"`trainyard estimate RECIPE --network {8 * wire / 1e9:.2g}` has what it costs"
            )
            return Row(what, found, WARN, advice)
        return Row(what, found)

    return Check(what, lambda context: _averaged(device, context.options.seconds), judge)


def _averaged(device: torch.device, seconds: float) -> float:
    """Bytes of a model per second that all ranks average."""
    dist.all_reduce(torch.zeros(1, device=device))  # opens connections
    wanted = int(_PROBE * seconds / _time_to_average(_PROBE, device) / 4)
    size = torch.tensor(min(max(wanted, _PROBE), _REDUCED[device.type]))
    dist.broadcast(size, 0)  # the same size on all ranks
    begun, sent, done = time.perf_counter(), 0, torch.zeros(1)
    while not done.item():
        _time_to_average(int(size), device)
        sent += int(size)
        done[0] = time.perf_counter() - begun > seconds
        dist.broadcast(done, 0)
    return sent / (time.perf_counter() - begun)


def _time_to_average(size: int, device: torch.device) -> float:
    tensor = torch.zeros(size // 4, device=device)
    begun = time.perf_counter()
    dist.all_reduce(tensor)
    _synchronize(tensor)
    return time.perf_counter() - begun


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _backend(device: torch.device) -> str:
    return "NCCL" if device.type == "cuda" else "gloo"


# --- links between machines ---


class LinkSpeed(NamedTuple):
    """Speed from one machine to another, measured by their first ranks."""

    sender: int
    receiver: int
    bytes: float  # per second


def _links(device: torch.device) -> Check:
    """Measures each machine with its two neighbours in a ring, with one at a time."""
    what = f"between machines by {_backend(device)}"

    def measure(context: Context) -> list[LinkSpeed | None]:
        found = []
        for pairs in rounds(sorted(context.machines)):
            gather(context.world, None)  # a round begins when the last one has ended everywhere
            for one, other in pairs:
                if context.world.rank in (one, other):
                    found += [_transfer(one, other, device, context)]
                    found += [_transfer(other, one, device, context)]
        return found

    def judge(values: list[list[LinkSpeed | None]], context: Context) -> Row:
        speeds = [speed for part in values for speed in part if speed is not None]
        return judge_links(speeds, context.machines, what)

    return Check(what, measure, judge)


def rounds(machines: list[int]) -> list[list[tuple[int, int]]]:
    """The links of a ring, in rounds in which each machine has at most one partner."""
    links = list(pairwise(machines))
    closing = [(machines[-1], machines[0])] if len(machines) > 2 else []
    return [links[0::2], links[1::2], closing]


def _transfer(
    sender: int, receiver: int, device: torch.device, context: Context
) -> LinkSpeed | None:
    """Sends blocks until the receiver has had enough of them; None on the receiver."""
    is_sender, limit = context.world.rank == sender, context.options.seconds / 4
    block = torch.zeros(_SENT[device.type], dtype=torch.uint8, device=device)
    answer = torch.zeros(1, device=device)  # 0: go on
    count, begun = -1, time.perf_counter()
    while not answer.item():
        if is_sender:
            dist.send(block, receiver)
            dist.recv(answer, receiver)
        else:
            dist.recv(block, sender)
            answer[0] = count >= 0 and time.perf_counter() - begun > limit
            dist.send(answer, sender)
        if count < 0:  # the first block opened the connection
            begun = time.perf_counter()
        count += 1
    speed = count * block.numel() / (time.perf_counter() - begun)
    return LinkSpeed(sender, receiver, speed) if is_sender else None


def judge_links(speeds: list[LinkSpeed], machines: Mapping[int, str], what: str) -> Row:
    """The row of all links, with the machine that the slow ones have in common."""
    values = [speed.bytes for speed in speeds]
    slowest = min(speeds, key=lambda speed: speed.bytes)
    found = f"{len(speeds) // 2:,} pairs: {in_bits(min(values))} to {in_bits(max(values))}"
    found += f", slowest {machines[slowest.sender]} to {machines[slowest.receiver]}"
    slow = [speed for speed in speeds if speed.bytes < _SLOW * max(values)]
    if not slow:
        return Row(what, found)
    worst = [speed for speed in slow if speed.bytes < min(values) / _SLOW]
    common = set[int].intersection(*({speed.sender, speed.receiver} for speed in worst))
    culprit = "of those in slow pairs"
    if common:
        culprit = "between these two" if len(common) == 2 else f"of {machines[common.pop()]}"
    advice = (
        f"{len(slow)} of {len(speeds)} ways are slower than half the fastest (median "
        f"{in_bits(statistics.median(values))}): look at the interface, cable and switch port "
        f"{culprit}, or leave it out"
    )
    return Row(what, found, FAIL if min(values) < _TOO_SLOW * max(values) else WARN, advice)


# --- clocks ---


def _clock(context: Context) -> float:
    """The time at a moment that is the same for all ranks, but for the time of a message."""
    gather(context.world, None)
    return time.time()


def _judge_clocks(values: list[float], context: Context) -> Row:
    skews = {rank: abs(values[rank] - values[0]) for rank in context.machines}
    worst = max(skews, key=lambda rank: skews[rank])
    found = f"within {in_seconds(skews[worst])}, most {context.machines[worst]}"
    if skews[worst] > _SKEW_S:
        verdict = FAIL if skews[worst] > _LARGE_SKEW_S else WARN
        return Row("clocks", found, verdict, "start chrony or another NTP client there")
    return Row("clocks", found)


# --- a directory shared by all ranks ---


def _sees_file(context: Context) -> bool:
    """True if this rank sees a file that the first rank writes to the run directory."""
    folder, world, file = existing(context.options.run), context.world, None
    if world.is_first:
        with suppress(OSError):  # reported by another check
            file = tempfile.NamedTemporaryFile(dir=folder, prefix=".trainyard-doctor-")  # noqa: SIM115
    try:
        name = gather(world, file and os.path.basename(file.name))[0]
        is_seen = name is None or _comes(folder / name)
        gather(world, None)  # all have looked
    finally:
        if file is not None:
            file.close()
    return is_seen


def _comes(path: Path) -> bool:
    deadline = time.monotonic() + _SEEN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        with suppress(OSError):
            os.listdir(path.parent)  # makes a network file system refresh
    return True


def _judge_file(values: list[bool], context: Context) -> Row:
    folder = existing(context.options.run)
    blind = {rank: "does not see it" for rank, is_seen in enumerate(values) if not is_seen}
    if not blind:
        return Row("run directory", f"{folder} is the same for all ranks")
    advice = (
        "put --run on a file system that all machines share: replicas that differ, and what is "
        "saved after a rank is lost need it"
    )
    return Row("run directory", f"{folder}: {differing(blind, context)}", WARN, advice)
