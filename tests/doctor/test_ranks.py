"""`trainyard doctor` on several ranks, and on several machines."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.doctor.test_alone import findings
from tests.services.network import INTERFACE, Link, NetworkError, network
from tests.spawn import launch, spawn
from tests.test_cli_signals import started
from trainyard.config import RunConfig
from trainyard.data.config import DataConfig
from trainyard.distributed.heartbeat import Heartbeat
from trainyard.doctor import machine
from trainyard.doctor.check import Options, Row
from trainyard.doctor.data import _digests
from trainyard.doctor.doctor import Findings, examine, examine_joined
from trainyard.doctor.network import LinkSpeed, judge_links, rounds
from trainyard.errors import InputError
from trainyard.monitor.environment import versions
from trainyard.run import resume
from trainyard.world import World

pytestmark = pytest.mark.slow

SIZE = 3
OPTIONS = Options(
    config=RunConfig(data=DataConfig(train="digits/train", val="digits/val")),
    run=Path("runs"),
    has_recipe=False,
    seconds=0.05,
)


def rows_of(world: World, options: Options) -> dict[str, Row]:
    """What ranks find that are each on a machine of its own, as far as they can tell."""
    apart = replace(world, node=world.rank, num_nodes=world.size, local_rank=0, local_size=1)
    found: Findings = examine_joined(options, apart, Console(quiet=True), Heartbeat())
    assert found.num_machines == world.size
    return {row.what: row for row in found.rows}


def examined(world: World, folders: list[Path]) -> dict[str, Row]:
    """In a working directory of each rank's own, with digits in it."""
    os.chdir(folders[world.rank])
    return rows_of(world, OPTIONS)


def ailing(world: World) -> dict[str, Row]:
    """The last rank has a single core."""
    if world.rank == SIZE - 1:
        machine.cores_per_rank = lambda world: 1  # type: ignore[attr-defined]
    return rows_of(world, replace(OPTIONS, config=RunConfig()))


def of_other_versions(world: World, folder: Path) -> None:
    """The last rank has another torch. Writes each rank's error."""
    if world.rank == SIZE - 1:
        resume.versions = lambda: versions() | {"torch": "1.0"}  # type: ignore[attr-defined]
    with pytest.raises(InputError) as caught:
        examine(replace(OPTIONS, config=RunConfig()), world, Console(quiet=True))
    (folder / f"{world.rank}").write_text(caught.value.code)


def copies(digits: Path, tmp_path: Path) -> list[Path]:
    folders = [tmp_path / str(rank) for rank in range(SIZE)]
    for folder in folders:
        shutil.copytree(digits, folder / "digits")
    return folders


def test_what_is_the_same_for_all(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "digits").symlink_to(digits)
    first, *others = spawn(examined, SIZE, [tmp_path] * SIZE)
    assert others == [first] * (SIZE - 1)
    assert [*first][5:] == [
        *("writing checkpoints", "space for the run", "space for caches"),
        *("space for temporary files", "run directory", "averaging by gloo"),
        *("between machines by gloo", "data", "reading samples"),
    ]
    assert not [row for row in first.values() if row.verdict == "fail" and "between" not in row[0]]
    assert first["run directory"].verdict == "ok"
    assert first["between machines by gloo"].found.startswith("3 pairs: ")
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_a_rank_that_differs_is_named() -> None:
    rows = spawn(ailing, SIZE)[0]
    assert rows["cores of a rank"].verdict == "warn"
    assert "least rank 2 (" in rows["cores of a rank"].found


def test_other_versions_on_a_rank_are_named(tmp_path: Path) -> None:
    """As at the start of a run, by the same check."""
    assert launch(of_other_versions, SIZE, tmp_path) == [0] * SIZE
    assert {path.read_text() for path in tmp_path.iterdir()} == {"rank.run-differs"}


def test_other_data_on_a_rank_is_named(digits: Path, tmp_path: Path) -> None:
    folders = copies(digits, tmp_path)
    image = next((folders[2] / "digits" / "train").rglob("*.png"))
    image.with_name("more.png").write_bytes(image.read_bytes())
    rows = spawn(examined, SIZE, folders)[0]
    assert rows["data"].verdict == "fail"
    assert "rank 2" in rows["data"].found and "rank 1" not in rows["data"].found
    assert "other files" in rows["data"].found
    assert rows["run directory"].verdict == "warn"
    assert "rank 1 (" in rows["run directory"].found


@pytest.mark.night
def test_other_bytes_on_a_rank_are_named(digits: Path, tmp_path: Path) -> None:
    folders = copies(digits, tmp_path)
    for image in (folders[1] / "digits" / "train").rglob("*.png"):
        content = bytearray(image.read_bytes())
        content[-20] ^= 1
        image.write_bytes(content)
    rows = spawn(examined, SIZE, folders)[0]
    assert rows["data"].verdict == "fail"
    assert "rank 1 (" in rows["data"].found and "rank 2" not in rows["data"].found


@pytest.mark.quick
def test_a_machine_tells_its_data_by_names_and_by_bytes(digits: Path, tmp_path: Path) -> None:
    found = []
    for number in range(2):
        folder = Path(shutil.copytree(digits, tmp_path / f"{number}"))
        for image in (folder / "train").rglob("*.png") if number else ():
            image.write_bytes(image.read_bytes()[:-20] + bytes(20))
        config = DataConfig(train=str(folder / "train"), val=str(folder / "val"))
        found.append(_digests(config, True, lambda *_: None))
    one, other = found
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, True, True]


# --- one machine ---


@pytest.mark.quick
def test_ranks_share_the_cores_of_their_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_quotas", lambda: {1: 6.0})
    context: Any = SimpleNamespace(world=World(size=4, local_size=4, cores=64))
    assert machine._cores(context) == 1.5


@pytest.mark.quick
def test_the_worst_row_decides() -> None:
    verdicts = ["ok", "warn", "fail"]
    rows = [Row("a", "", verdict) for verdict in verdicts]
    assert [Findings(rows[:count], [], 1, 1).verdict for count in (1, 2, 3)] == verdicts


# --- started as a run is ---


def test_in_place_of_training(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--data", digits, "--run", folder, "--ranks", 2, "--doctor", "--json")
    with started(tmp_path, "launch", "local", "debug", *words) as command:
        out, err = command.process.communicate(timeout=250)
        assert command.members() == []
    rows, rest = findings(out)
    assert (rest["num_ranks"], rest["num_machines"]) == (2, 1)
    assert command.process.returncode == (rest["verdict"] == "fail"), err
    assert rows["data"]["verdict"] == "ok"
    assert len(rest["left_out"]) == 1
    assert not folder.exists()


@pytest.mark.night
def test_a_slow_link_is_found(tmp_path: Path) -> None:
    slow = 2
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        with network(3) as emulated:
            emulated.set(Link(), slow={slow: Link(10)})
            ranks = [
                host.start(
                    *(sys.executable, "-m", "trainyard", "doctor", "--quick", "--json"),
                    env=environment | emulated.rank_variables(host.number),
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=tmp_path,
                )
                for host in emulated.hosts
            ]
            out, *_ = [rank.communicate(timeout=250)[0] for rank in ranks]
    except NetworkError as error:
        pytest.skip(str(error))
    assert {rank.returncode for rank in ranks} == {1}
    rows, rest = findings(out)
    assert (rest["num_ranks"], rest["num_machines"]) == (3, 3)
    row = rows["between machines by gloo"]
    assert row["verdict"] == "fail"
    assert f"slowest {os.uname().nodename} (rank {slow}) to " in row["found"]
    assert f"{os.uname().nodename} (rank {slow})" in row["advice"]
    assert rows["averaging by gloo"]["verdict"] == "warn"
    assert INTERFACE in rows["averaging by gloo"]["found"]


# --- links between machines ---


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 65])
def test_each_machine_meets_its_neighbours_one_at_a_time(size: int) -> None:
    turns = rounds(list(range(size)))
    for pairs in turns:
        machines = [machine for pair in pairs for machine in pair]
        assert len(machines) == len(set(machines))
    met = sorted(tuple(sorted(pair)) for pairs in turns for pair in pairs)
    ring = {tuple(sorted((machine, (machine + 1) % size))) for machine in range(size)}
    assert met == sorted(ring)


def judged(**slow: float) -> Row:
    """Of a ring of four machines, with speeds of some ways that are not 1."""
    names = dict(enumerate("abcd"))
    ways = [(a, b) for a in names for b in names if (a - b) % 2]
    speeds = [LinkSpeed(a, b, slow.get(names[a] + names[b], 1.0) * 1e9) for a, b in ways]
    return judge_links(speeds, names, "links")


def test_the_guilty_is_found() -> None:
    assert judged().verdict == "ok"
    assert judged(ab=0.6).verdict == "ok"
    one_way = judged(bc=0.4)
    assert one_way.verdict == "warn"
    assert "b to c" in one_way.found
    assert " c, " in judged(cb=0.3, cd=0.3, dc=0.3).advice
    assert judged(cb=0.05).verdict == "fail"
