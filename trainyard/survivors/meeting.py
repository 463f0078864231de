"""Where ranks meet that can no longer ask each other anything: files of the run directory.

.survivors-1a2b3c4d/
    00001.json            a survivor's answer: how far it came, and whom it knows to be gone
    decision.json         who answered in time; of the first that saw it
    00001.pt, replicas/   of replicas that differ: weights for their mean, and what each saves
    00001.written.json    that those are there, with their checksums
    outcome.json          what came of it, in words
"""

import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from trainyard.files import RunDirectory, part_of, write_text, writing
from trainyard.rendezvous import Place
from trainyard.world import World, gather, together

_ANSWER_S = 10  # for all survivors to notice: they may be in the midst of a long step
_LOOK_S = 0.05


class Decision(NamedTuple):
    """What all survivors go by."""

    steps: dict[int, int]
    """How many steps each survivor has made."""
    gone: list[int]

    @property
    def step(self) -> int:
        return max(self.steps.values())

    @property
    def writer(self) -> int:
        """One that is furthest."""
        return min(rank for rank, step in self.steps.items() if step == self.step)


class Meeting:
    """A folder that the ranks of one start of a run know, made when it is needed."""

    def __init__(self, folder: RunDirectory, world: World) -> None:
        """Every rank calls it; what earlier starts have left is removed."""
        with together(world):
            for old in folder.path.glob(".survivors-*") if world.is_first else ():
                shutil.rmtree(old, ignore_errors=True)
        self.path = gather(world, folder.path / f".survivors-{token_hex(4)}")[0]
        self._world = world
        self._places = gather(world, Place.mine())

    def take_leave(self) -> None:
        """Of the others, which then know: this rank ends by an error of its own."""
        self.tell("", {"gone": [self._world.rank]})

    def decide(self, step: int, hung: list[int], **more: Any) -> Decision:
        """Answer with the number of steps made and whatever else the others are to know.

        `hung`: whom not to wait for, though their processes may still be there.

        It is decided when each rank has answered or is known to be gone, but after 10 s by those
        who have answered; one of which no more is known then is taken to be gone if no other is.
        """
        everyone = set(range(self._world.size))
        deadline = time.monotonic() + _ANSWER_S
        told: list[int] | None = None
        while not (self.path / "decision.json").exists():
            gone = sorted({*self._seen_to_be_gone(), *hung})
            if gone != told:
                self.tell("", {"gone": gone, "step": step, **more})
                told = gone
            answers = self.answers()
            known = {rank for answer in answers.values() for rank in answer["gone"]}
            if known | answers.keys() == everyone or time.monotonic() > deadline:
                steps = {rank: answers[rank]["step"] for rank in answers.keys() - known}
                missing = sorted(known or everyone - answers.keys())
                _write_once(self.path / "decision.json", {"steps": steps, "gone": missing})
            time.sleep(
                _LOOK_S * max(1, self._world.size / 50)
            )  # each looks for each on a file server
        decision = self.wait_for("decision.json", _ANSWER_S)
        steps = {int(rank): step for rank, step in decision["steps"].items()}
        return Decision(steps, decision["gone"])

    def _seen_to_be_gone(self) -> list[int]:
        here = self._places[self._world.rank]
        places = enumerate(self._places)
        return [rank for rank, place in places if place.is_seen_to_be_gone(here)]

    def answers(self) -> dict[int, dict[str, Any]]:
        """What each rank has told."""
        files = ((rank, self.path / f"{rank:05d}.json") for rank in range(self._world.size))
        return {rank: json.loads(file.read_text()) for rank, file in files if file.exists()}

    def names(self, ranks: list[int]) -> str:
        return ", ".join(f"rank {rank} ({self._places[rank]})" for rank in ranks)

    def tell(self, what: str, value: Any) -> None:
        self.write(f"{self._world.rank:05d}{what}.json", value)

    def write(self, name: str, value: Any) -> None:
        with writing(self.path):
            self.path.mkdir(exist_ok=True)
        write_text(self.path / name, json.dumps(value))

    def wait_for(self, name: str, seconds: float) -> Any:
        """What a file says, once it is there. TimeoutError if it does not come."""
        path, deadline = self.path / name, time.monotonic() + seconds
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {name} after {seconds} s")
            time.sleep(_LOOK_S)
        return json.loads(path.read_text())


def _write_once(path: Path, value: Any) -> None:
    """A file that appears whole and that nobody replaces."""
    part = part_of(path)
    try:
        with writing(path):
            part.write_text(json.dumps(value))
        with suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)
