"""Checks between ranks: exchanges of all, links between machines, the run directory."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
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
from trainyard.world import broadcast, gather

_RESNET50 = 4 * 25.6e6  # bytes of its gradients
_SLOW_LINK = 1e9 / 8  # bytes per second
_FIRST = 1 << 18  # bytes that are sent first, and at most
_MOST = {"cpu": 1 << 24, "cuda": 1 << 28}
_SLOW, _TOO_SLOW = 0.5, 0.1  # share of the fastest link's speed
_SEEN_S = 5  # for another machine to see a new file: network file systems refresh now and then


def network_checks(context: Context) -> list[Check]:
    """Checks that all ranks run together."""
    devices = [torch.device("cpu")] + [context.device] * context.has_own_gpus
    exchanges = [Check("run directory", _sees_file, _judge_file), *map(_averaging, devices)]
    return [*exchanges, *(map(_links, devices) if len(context.machines) > 1 else ())]


# --- speeds ---


def _rate(
    send: Callable[[Tensor], None], agree: Callable[[float], float], device: torch.device, s: float
) -> float:
    """Bytes per second of `send`, in blocks that take a part of `s` seconds each.

    `agree` turns this rank's seconds into those by which all who take part decide.
    """
    send(torch.zeros(1, device=device))  # opens connections
    size, sent, spent = _FIRST, 0, 0.0
    while spent < s:
        block = torch.zeros(size // 4, device=device)
        started = time.perf_counter()
        send(block)
        if block.is_cuda:
            torch.cuda.synchronize(device)
        took = agree(time.perf_counter() - started)
        if took < s / 8 and size < _MOST[device.type]:
            size, sent, spent = 4 * size, 0, 0.0
        else:
            sent, spent = sent + size, spent + took
    return sent / spent


def _backend(device: torch.device) -> str:
    return "NCCL" if device.type == "cuda" else "gloo"


def _averaging(device: torch.device) -> Check:
    """Measures the average of all ranks, as in training."""
    what = f"averaging by {_backend(device)}"

    def measure(context: Context) -> float:
        def send(block: Tensor) -> None:
            dist.all_reduce(block)

        def slowest(took: float) -> float:
            return max(gather(context.world, took))

        return _rate(send, slowest, device, context.options.seconds)

    def judge(values: list[float], context: Context) -> Row:
        speed, size = values[0], context.world.size
        wire = 2 * (size - 1) / size * speed  # bytes that a ring sends and receives
        text = f"{in_bits(wire)} each way: ResNet-50 in {in_seconds(_RESNET50 / speed)}"
        if device.type == "cpu":
            text += f", by the interface {os.environ.get('GLOO_SOCKET_IFNAME', 'of the host')}"
        if len(context.machines) > 1 and wire < _SLOW_LINK:
            advice = (
                "is this the fastest interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)? If so, "
                "average.name = 'periodic' sends least"
            )
            return Row(what, text, WARN, advice)
        return Row(what, text)

    return Check(what, measure, judge)


# --- links between machines ---


class LinkSpeed(NamedTuple):
    """Speed from one machine to another, measured by their first ranks."""

    sender: int
    receiver: int
    bytes: float  # per second


def _links(device: torch.device) -> Check:
    """Measures each machine with its two neighbours in a ring, with one at a time."""
    what = f"between machines by {_backend(device)}"

    def measure(context: Context) -> list[LinkSpeed]:
        rank, seconds, speeds = context.world.rank, context.options.seconds / 4, []
        for pairs in rounds(sorted(context.machines)):
            gather(context.world, None)  # a round begins when the last one has ended everywhere
            for pair in pairs:
                for sender, receiver in (pair, pair[::-1]) if rank in pair else ():
                    speed = _one_way(sender, receiver, device, seconds)
                    speeds += [LinkSpeed(sender, receiver, speed)] if rank == sender else []
        return speeds

    def judge(values: list[list[LinkSpeed]], context: Context) -> Row:
        return judge_links([speed for part in values for speed in part], context.machines, what)

    return Check(what, measure, judge)


def rounds(machines: list[int]) -> list[list[tuple[int, int]]]:
    """The links of a ring, in rounds in which each machine has at most one partner."""
    links = list(pairwise(machines))
    closing = [(machines[-1], machines[0])] if len(machines) > 2 else []
    return [links[0::2], links[1::2], closing]


def _one_way(sender: int, receiver: int, device: torch.device, seconds: float) -> float:
    """Bytes per second from one rank to another, on both."""
    word = torch.zeros(1, device=device)

    def send(block: Tensor) -> None:
        _pass(block, sender, receiver)
        _pass(word, receiver, sender)  # it has arrived

    def agree(took: float) -> float:
        word[0] = took
        _pass(word, sender, receiver)
        return word.item()

    return _rate(send, agree, device, seconds)


def _pass(tensor: Tensor, sender: int, receiver: int) -> None:
    if dist.get_rank() == sender:
        dist.send(tensor, receiver)
    else:
        dist.recv(tensor, sender)


def judge_links(speeds: list[LinkSpeed], machines: Mapping[int, str], what: str) -> Row:
    """The row of all links, with the machine that the slow ones have in common."""
    values = [speed.bytes for speed in speeds]
    slowest = min(speeds, key=lambda speed: speed.bytes)
    text = f"{len(speeds) // 2:,} pairs: {in_bits(min(values))} to {in_bits(max(values))}"
    text += f", slowest {machines[slowest.sender]} to {machines[slowest.receiver]}"
    slow = [speed for speed in speeds if speed.bytes < _SLOW * max(values)]
    if not slow:
        return Row(what, text)
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
    return Row(what, text, FAIL if min(values) < _TOO_SLOW * max(values) else WARN, advice)


# --- a directory shared by all ranks ---


def _sees_file(context: Context) -> bool:
    """True if this rank sees a file that the first rank writes to the run directory."""
    folder, world, file = existing(context.options.run), context.world, None
    if world.is_first:
        with suppress(OSError):  # reported by another check
            file = tempfile.NamedTemporaryFile(dir=folder, prefix=".trainyard-doctor-")  # noqa: SIM115
    name = broadcast(world, file and Path(file.name).name)
    deadline = time.monotonic() + _SEEN_S
    while name and not (folder / name).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
        with suppress(OSError):
            os.listdir(folder)  # makes a network file system refresh
    is_seen = name is None or (folder / name).exists()
    gather(world, None)  # all have looked
    if file is not None:
        file.close()
    return is_seen


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
