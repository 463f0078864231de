"""Checks between ranks: message latency, bandwidth of all and of pairs of machines, clocks."""

import os
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from trainyard.doctor.patient import Patient
from trainyard.doctor.rows import FAIL, WARN, Check, Row
from trainyard.monitor.units import in_bits, in_seconds
from trainyard.world import gather

_ROUND_TRIPS = 20
_SLOW_MESSAGE_S = 0.01
_REDUCED = {"cpu": 1 << 24, "cuda": 1 << 28}  # bytes at most
_RESNET50 = 4 * 25.6e6  # bytes of its gradients
_SLOW_LINK = 1e9 / 8  # bytes per second
_PROBE = 1 << 18  # bytes of a first message, whose time sets the size of the next
_LARGEST = 1 << 28
_ALL_PAIRS = 64  # most machines for which every pair is measured
_SAMPLED = 16  # rounds of pairs for more machines
_SLOW, _TOO_SLOW = 0.5, 0.1  # share of the fastest pair's speed
_SKEW_S, _LARGE_SKEW_S = 0.5, 60.0
_CLOCK_TRIPS = 5


# --- all ranks at once ---


def _message(patient: Patient) -> float:
    """Seconds per all-reduce of one number."""
    word = torch.zeros(1)
    dist.all_reduce(word)
    begun = time.perf_counter()
    for _ in range(_ROUND_TRIPS):
        dist.all_reduce(word)
    return (time.perf_counter() - begun) / _ROUND_TRIPS


def _judge_message(values: list[float], patient: Patient) -> Row:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "of the host's name")
    found = f"an agreement of all takes {in_seconds(max(values))} by the interface {interface}"
    if max(values) > _SLOW_MESSAGE_S:
        advice = "averaging seldom costs less here: average.name = 'periodic' or 'gossip'"
        return Row("messages", found, WARN, advice)
    return Row("messages", found)


def _reduced(device: torch.device, seconds: float) -> float:
    """Bytes of a model per second that all ranks average."""
    dist.all_reduce(torch.zeros(1, device=device))  # opens connections
    took = _time_to_average(_PROBE, device)
    wanted = int(_PROBE * seconds / took / 4)
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
    _settled(tensor)
    return time.perf_counter() - begun


def _settled(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _reducing(device: torch.device) -> Check:
    backend = "NCCL" if device.type == "cuda" else "gloo"
    what = f"averaging by {backend}"

    def judge(values: list[float], patient: Patient) -> Row:
        speed, size = min(values), patient.world.size
        wire = 2 * (size - 1) / size * speed  # bytes that a ring sends and receives
        found = f"{in_bits(wire)} each way: ResNet-50 in {in_seconds(_RESNET50 / speed)}"
        if len(patient.leaders) > 1 and wire < _SLOW_LINK:
            advice = (
                "is this the fastest interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)? "
                f"`trainyard estimate RECIPE --bandwidth {8 * wire / 1e9:.2g}` compares averagers"
            )
            return Row(what, found, WARN, advice)
        return Row(what, found)

    return Check(what, lambda patient: _reduced(device, patient.question.seconds), judge)


def exchanges(patient: Patient) -> list[Check]:
    """Checks that all ranks run together."""
    return [Check("messages", _message, _judge_message), *map(_reducing, devices(patient))]


def devices(patient: Patient) -> list[torch.device]:
    """Devices of messages: gloo for the CPU, NCCL for a GPU."""
    return [torch.device("cpu")] + [patient.device] * patient.has_own_gpus


# --- two machines at a time ---


class Speed(NamedTuple):
    """Speed from one machine to another, measured by their first ranks."""

    sender: int
    receiver: int
    bytes: float  # per second


def rounds(nodes: list[int]) -> list[list[tuple[int, int]]]:
    """Rounds of a tournament: each node has one partner per round, and each pair meets once.

    The circle method: one node stays, the others move on by one place. For more than 64 nodes,
    only neighbours and some rounds of the tournament are measured.
    """
    players: list[int | None] = [*nodes, *[None] * (len(nodes) % 2)]  # the partner of None rests
    half, count = len(players) // 2, len(players) - 1
    chosen = range(count)
    if len(nodes) > _ALL_PAIRS:
        chosen = range(0, count, count // _SAMPLED)
    found = []
    for turn in chosen:
        moving = players[1:]
        circle = [players[0], *moving[turn:], *moving[:turn]]
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
    return [*found, *_neighbours(nodes)] if len(nodes) > _ALL_PAIRS else found


def _neighbours(nodes: list[int]) -> list[list[tuple[int, int]]]:
    """Pairs of adjacent nodes, in two rounds."""
    links = list(pairwise(nodes))
    return [links[0::2], links[1::2]]


def between_machines(patient: Patient, device: torch.device) -> Row:
    """Measure pairs of machines, each with one partner at a time; all ranks call it."""
    world, found = patient.world, []
    turns = rounds(patient.leaders)
    backend = "NCCL" if device.type == "cuda" else "gloo"
    for number, pairs in enumerate(turns):
        patient.say(f"between machines by {backend}: round {number + 1} of {len(turns)}")
        mine = [pair for pair in pairs if world.rank in pair]
        speeds = [speed for pair in mine for speed in _duel(pair, world.rank, device, patient)]
        found += [speed for part in gather(world, speeds) for speed in part]
    return judge_pairs(found, patient, f"between machines by {backend}")


def _duel(
    pair: tuple[int, int], rank: int, device: torch.device, patient: Patient
) -> Iterator[Speed]:
    """Yields this rank's measurement as the sender."""
    for sender, receiver in (pair, pair[::-1]):
        if rank == sender:
            yield Speed(sender, receiver, _send(receiver, device, patient.question.seconds / 4))
        else:
            _receive(sender, device)


def _send(receiver: int, device: torch.device, seconds: float) -> float:
    _sent(torch.zeros(1, dtype=torch.uint8, device=device), receiver)  # opens the connection
    took = _sent(torch.zeros(_PROBE, dtype=torch.uint8, device=device), receiver)
    size = int(min(max(_PROBE * seconds / took, _PROBE), _LARGEST))
    dist.send(torch.tensor([size], device=device), receiver)
    return size / _sent(torch.zeros(size, dtype=torch.uint8, device=device), receiver)


def _sent(content: Tensor, receiver: int) -> float:
    """Seconds until the receiver has confirmed."""
    receipt = torch.zeros(1, dtype=torch.uint8, device=content.device)
    begun = time.perf_counter()
    dist.send(content, receiver)
    dist.recv(receipt, receiver)
    _settled(receipt)
    return time.perf_counter() - begun


def _receive(sender: int, device: torch.device) -> None:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    for size in (1, _PROBE, None):
        if size is None:
            dist.recv(length, sender)
        content = torch.zeros(size or int(length), dtype=torch.uint8, device=device)
        dist.recv(content, sender)
        dist.send(content[:1], sender)


def judge_pairs(speeds: list[Speed], patient: Patient, what: str) -> Row:
    names, values = patient.node_names, [speed.bytes for speed in speeds]
    count = len(patient.leaders) * (len(patient.leaders) - 1)
    of = f" of {count // 2:,}" if len(speeds) < count else ""
    slowest = min(speeds, key=lambda speed: speed.bytes)
    found = f"{len(speeds) // 2:,}{of} pairs: {in_bits(min(values))} to {in_bits(max(values))}"
    found += f", slowest {names[slowest.sender]} to {names[slowest.receiver]}"
    slow = [speed for speed in speeds if speed.bytes < _SLOW * max(values)]
    if not slow:
        return Row(what, found)
    verdict = FAIL if min(values) < _TOO_SLOW * max(values) else WARN
    median = in_bits(statistics.median(values))
    worst = [speed for speed in slow if speed.bytes < min(values) / _SLOW]
    advice = (
        f"{len(slow)} of {len(speeds)} ways are slower than half the fastest (median {median}): "
        f"look at the interface, cable and switch port {_of_all(worst, names)}, or leave it out"
    )
    return Row(what, found, verdict, advice)


def _of_all(speeds: list[Speed], names: dict[int, str]) -> str:
    """The machine that the slow pairs have in common."""
    common = set[int].intersection(*({speed.sender, speed.receiver} for speed in speeds))
    if len(common) == 2:
        return "between these two"
    return f"of {names[common.pop()]}" if common else "of those in slow pairs"


# --- clocks ---


def clocks(patient: Patient) -> Row:
    """The offsets of machines' clocks from the first one's; all ranks call it.

    As in NTP: of several requests, the fastest counts, and its answer is assumed to lie half-way
    between sending and receiving.
    """
    world, others, found = patient.world, patient.leaders[1:], {}
    if world.is_first:
        found = {node: _ask_clock(node) for node in others}
    elif world.rank in others:
        _tell_clock()
    found = gather(world, found)[0]
    worst = max(found, key=lambda node: abs(found[node]))
    skew = abs(found[worst])
    text = f"within {in_seconds(skew)}, most {patient.node_names[worst]}"
    if skew > _SKEW_S:
        verdict = FAIL if skew > _LARGE_SKEW_S else WARN
        return Row("clocks", text, verdict, "start chrony or another NTP client there")
    return Row("clocks", text)


def _ask_clock(node: int) -> float:
    """Seconds that the other clock is ahead, less the uncertainty; negative if it is behind."""
    answers = []
    for _ in range(_CLOCK_TRIPS):
        told = torch.zeros(1, dtype=torch.float64)
        begun = time.time()
        dist.send(told, node)
        dist.recv(told, node)
        ended = time.time()
        answers.append((ended - begun, float(told) - (begun + ended) / 2))
    took, ahead = min(answers)
    return max(abs(ahead) - took / 2, 0.0) * (1 if ahead > 0 else -1)


def _tell_clock() -> None:
    for _ in range(_CLOCK_TRIPS):
        word = torch.zeros(1, dtype=torch.float64)
        dist.recv(word, 0)
        dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
