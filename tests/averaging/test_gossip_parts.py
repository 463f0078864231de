"""Gossip bucket by bucket: what is updated is sent while the rest is not yet updated."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import optim
from torch.nn import functional as F

from tests.averaging.test_gossip import CPU, Array, Case, flat, model_of, on_two_nodes, samples
from tests.spawn import spawn
from tests.training.test_equivalence import make_step
from trainyard.averaging import gossip
from trainyard.averaging.flat import split_into_buckets
from trainyard.averaging.gossip import Gossip
from trainyard.training.step import MicroBatch
from trainyard.training.update import LossScale, Update, clip_by_norm
from trainyard.world import World

STEPS = 7
CASES = [
    Case("complete"),
    Case("ring", mixing=0.25),
    Case("one-peer-exponential"),
    Case("tests.averaging.test_topology:star", mixing=0.5),  # in which some rest
    Case("complete", mixing=0.5, compress="bf16"),
    Case("ring", overlap=False),
    Case("one-peer-exponential", hierarchical=True),
]


class Trained:
    """A replica, its update fused, that goes on step by step."""

    def __init__(self, world: World, case: Case, *, adam: bool) -> None:
        self.world, self.model = world, model_of()
        self.averager = Gossip(case.config, on_two_nodes(world))
        self.wrapped = self.averager.wrap(self.model)
        parameters = self.model.parameters()
        if adam:
            optimizer: optim.Optimizer = optim.AdamW(parameters, 0.01, fused=True)
        else:
            optimizer = optim.SGD(parameters, 0.2, 0.9, fused=True)
        self.update = Update(
            self.model,
            optimizer,
            LossScale(CPU),
            clip=clip_by_norm(0.3),
            measure=lambda step: False,
        )

    def backward(self, step: int) -> None:
        images, labels = samples(step, self.world.rank)
        F.cross_entropy(self.wrapped(images), labels).backward()  # type: ignore[no-untyped-call]


def train(world: World, case: Case, *, adam: bool, divided: bool) -> list[Array]:
    trained, found = Trained(world, case, adam=adam), []
    for step in range(STEPS):
        trained.backward(step)
        # A replica may go back and forth by itself; the ranks of a node do it alike.
        is_divided = divided and bool(step % 3 or world.rank > 1)
        trained.update(step, lambda step, _: trained.averager.ready_parameters(step, is_divided))  # noqa: B023
        found.append(flat(trained.model))
    with trained.averager.consensus():
        return found


def train_in_all_ways(world: World) -> list[bool]:
    torch.set_num_threads(1)
    gossip._BUCKET_BYTES = 300  # so that there are several
    ways = [(case, adam) for case in CASES for adam in (False, True)]
    return [
        np.array_equal(
            train(world, case, adam=adam, divided=True),
            train(world, case, adam=adam, divided=False),
        )
        for case, adam in ways
    ]


def test_part_by_part_is_the_same_bit_by_bit() -> None:
    assert spawn(train_in_all_ways, 4) == [[True] * 2 * len(CASES)] * 4


def note_order(world: World) -> list[str]:
    """The events of each bucket in a step: no bucket waits for all to arrive or to be updated."""
    torch.set_num_threads(1)
    gossip._BUCKET_BYTES = 300
    trained = Trained(world, Case("complete"), adam=False)
    events: list[str] = []

    def noted(name: str, number: int, function: Any) -> Any:
        def note(*words: Any) -> None:
            events.append(f"{name} {number}")
            function(*words)

        return note

    for number, bucket in enumerate(trained.averager._buckets):
        for name in ("wait", "mix", "send"):
            setattr(bucket, name, noted(name, number, getattr(bucket, name)))
    for step in range(2):
        trained.backward(step)
        events.clear()
        for number, _ in enumerate(trained.averager.ready_parameters(step, True)):
            events.append(f"update {number}")
    told = list(events)
    with trained.averager.consensus():
        return told


def test_what_is_updated_is_sent_at_once() -> None:
    """And what has arrived is mixed at once, though the rest has not."""
    for told in spawn(note_order, 2):
        number = len({event.split()[1] for event in told})
        assert number > 2
        turns = ("wait", "mix", "update", "send")
        assert told == [f"{what} {n}" for n in range(number) for what in turns]


class Updating:
    """A watch of updates."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def __enter__(self) -> None:
        self.events.append("begins")

    def __exit__(self, *_: object) -> None:
        self.events.append("ends")


def note_waiting(world: World) -> list[str]:
    """Of a step that is to say how long its update takes, between two others."""
    torch.set_num_threads(1)
    trained, events = Trained(world, Case("complete"), adam=False), []
    step = replace(make_step(trained.model, trained.averager, world), update=trained.update)
    bucket = trained.averager._buckets[-1]
    wait = bucket.wait

    def noted() -> None:
        events.append("waits")
        wait()

    bucket.wait = noted  # type: ignore[method-assign]
    for number in range(3):
        images, labels = samples(number, world.rank)
        batch = MicroBatch(images, labels, labels, torch.ones(4), torch.ones(4))
        events.append(str(number))
        step.timed(batch, number, None, Updating(events) if number == 1 else None)
    told = list(events)
    with trained.averager.consensus():
        return told


def test_waiting_is_no_part_of_a_timed_update() -> None:
    """Else a run that its network bounds would be said to be bound by its device."""
    timed = ["begins", "ends"]  # the gradient's norm, a bucket's update, what is left, the average
    expected = ["0", "waits", "1", *timed, "waits", *timed, *timed, *timed, "2", "waits"]
    assert spawn(note_waiting, 2) == [expected] * 2


def test_the_first_buckets_are_small() -> None:
    """So that the network rests as short as may be while the first one is updated."""
    tensors = [torch.zeros(2) for _ in range(40)]  # of 8 bytes each
    assert [len(some) for some in split_into_buckets(tensors, 100, 8)] == [1, 4, 12, 12, 11]
    assert [len(some) for some in split_into_buckets(tensors, 100)] == [12, 12, 12, 4]
    assert [len(some) for some in split_into_buckets(tensors, 100, 1000)] == [12, 12, 12, 4]
    tensors.insert(1, torch.zeros(99))
    assert [len(some) for some in split_into_buckets(tensors, 100, 8)] == [1, 1, 12, 12, 12, 3]
