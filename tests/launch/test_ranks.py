"""The ranks of one host, as processes."""

import json
import os
import signal
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.test_cli_signals import wait_for
from trainyard.launch.ranks import End, Line, Ranks, Share, shares_of

HELLO = 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $GROUP_RANK, $MASTER_PORT"'
ENDLESS = "echo ready; sleep 1000 & while :; do wait; done"


class Heard:
    def __init__(self) -> None:
        self.lines: dict[int, list[tuple[str, bool]]] = defaultdict(list)
        self.ends: dict[int, int] = {}

    def start(self, share: Share) -> Ranks:
        def put(event: Line | End) -> None:
            assert event.rank not in self.ends
            if isinstance(event, Line):
                self.lines[event.rank].append((event.text, event.is_error))
            else:
                self.ends[event.rank] = event.code

        return Ranks(share, put)


def share(script: str, **counts: int) -> Share:
    """Of host b."""
    return shares_of(("sh", "-c", script), counts, address="10.0.0.1", port=1234)["b"]


def test_shares_are_plain_data() -> None:
    mine = share(HELLO, a=2, b=3)
    assert (mine.first, mine.count, mine.size, mine.node, mine.num_nodes) == (2, 3, 5, 1, 2)
    again = Share(**json.loads(json.dumps(asdict(mine))))
    assert again.environment(1) == mine.environment(1)
    assert mine.environment(0)["FORCE_COLOR"] == ""


def test_a_process_that_left_its_rank_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainyard.launch.ranks._READ_S", 0.2)
    heard = Heard()
    ranks = heard.start(share("setsid sleep 1000 & echo $!", b=1))
    assert ranks.wait(30) and heard.ends == {0: 0}
    os.kill(int(heard.lines[0][0][0]), signal.SIGKILL)


def test_lines_then_the_end() -> None:
    heard = Heard()
    ranks = heard.start(share(f"{HELLO}; echo oh >&2; exit $RANK", a=1, b=2))
    assert ranks.wait(30)
    assert heard.ends == {1: 1, 2: 2}
    assert sorted(heard.lines[2]) == [("2 of 3, 1 of 2, 1, 1234", False), ("oh", True)]


@pytest.mark.parametrize(("trap", "code"), [("", -signal.SIGTERM), ("trap '' TERM;", -9)])
def test_stop(trap: str, code: int) -> None:
    heard = Heard()
    ranks = heard.start(share(f"{trap} echo $$; {ENDLESS}", b=1))
    wait_for(lambda: ("ready", False) in heard.lines[0], "the rank")
    session = int(heard.lines[0][0][0])
    ranks.stop(0.2 if trap else 60)
    assert heard.ends == {0: code} and ranks.wait(0)
    wait_for(lambda: not living(session), "what it had started to be gone")


def living(session: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(process.name))
    return found


def test_signals_go_to_running_ranks() -> None:
    heard = Heard()
    script = f"[ $RANK = 0 ] && exit; trap 'echo told; exit 75' USR1; {ENDLESS}"
    ranks = heard.start(share(script, b=3))
    wait_for(lambda: len(heard.lines) == 2 and heard.ends == {0: 0}, "two ranks")
    ranks.signal(signal.SIGUSR1)
    assert ranks.wait(30)
    assert heard.ends == {0: 0, 1: 75, 2: 75}


def test_a_command_that_is_not_there() -> None:
    wrong = shares_of(("/no/such",), {"b": 2}, address="a", port=1)["b"]
    with pytest.raises(FileNotFoundError):
        Heard().start(wrong)
