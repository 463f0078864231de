"""`launch ray`: what is refused before Ray is asked for anything."""

import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from tests.command_line import Capture, run
from tests.errors import check, refused
from tests.web import free_port
from trainyard.errors import InputError, PeerError, Requeued, TrainyardError

LAUNCH = ("launch", "ray", "debug")


def test_dry_run(capfd: Capture) -> None:
    assert run(*LAUNCH, "--nodes", 2, "--gpus", 4, "--run", "runs/here", "--dry-run") == 0
    python = shlex.quote(sys.executable)
    assert capfd.readouterr().out == (
        f"2 x a node of Ray: 4 x {python} -P -m trainyard train debug --run runs/here\n"
    )


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    check(refused(*LAUNCH), "launch.needs-ray")


def test_a_ray_that_was_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: object, **__: object) -> None:
        raise ConnectionError("no running Ray")

    ray = SimpleNamespace(init=init, shutdown=lambda: None, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    check(refused(*LAUNCH, "--address", "auto"), "launch.ray-failed", address="auto")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    check(refused(*LAUNCH), "launch.ray-failed", address="auto")


def test_mistakes(tmp_path: Path) -> None:
    check(refused(*LAUNCH, "--working-dir", "."), "launch.run-in-working-copy")
    path = tmp_path / "environment.yaml"
    check(refused(*LAUNCH, "--runtime-env", path), "launch.runtime-env-unusable", path=path)
    path.write_text("- pip\n")
    check(refused(*LAUNCH, "--runtime-env", path), "launch.runtime-env-unusable", path=path)


def test_tokens_are_not_in_what_ray_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dashboard has the configuration of a training, where it follows trainings."""
    _real_ray()
    from trainyard.launch.job import Job
    from trainyard.launch.ray import RayOptions, _trainer

    monkeypatch.setenv("TRAINYARD_TOKENS", "host=secret")
    job = Job(("train", "debug"), tmp_path)
    trainer = _trainer(job, RayOptions(), {"CPU": 1}, board=None, folder=str(tmp_path))
    assert "secret" not in str(trainer.train_loop_config)


def test_a_ray_of_other_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that no contract of Ray's keeps; they are asked for before the run."""
    version = _real_ray().__version__
    monkeypatch.setattr("trainyard.launch.ray.connected", lambda _: nullcontext())
    monkeypatch.setitem(sys.modules, "trainyard.launch.ray_scaling", None)
    check(refused(*LAUNCH), "launch.other-ray", version=version)


def test_attempts_end_with_a_mistake_or_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that makes a mistake may be the cause that others fail."""
    _real_ray()
    from trainyard.launch.ray_nodes import Board

    board, now = Board(), time.monotonic()
    assert board.begin(2) == 1
    board.end(0, 1)
    assert (board.is_running(), board.codes()) == (True, {0: 1})
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    assert not board.is_running()  # node 1 is dead, and Ray may not begin another attempt
    assert (board.signals(1), board.is_running()) == ([], True)
    board.over()
    assert not board.is_running()
    assert board.begin(2) == 2
    board.end(0, PeerError.exit_code)
    board.end(1, InputError.exit_code)
    assert not board.begin(2)

    board = Board()
    board.signal(signal.SIGTERM)
    assert not board.begin(2)


def test_a_run_that_lost_its_last_node_has_failed_though_the_others_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fit(is_over: Callable[[], bool]) -> None:
        raise RuntimeError("a node is lost")

    for code, meaning in ((Requeued.exit_code, 1), (0, 1), (-signal.SIGKILL, 137)):
        with pytest.raises(TrainyardError) as caught:
            _await_end(monkeypatch, fit, [], codes={0: code})
        assert caught.value.exit_code == meaning


@pytest.mark.parametrize("looks", [0, 50])
def test_the_launcher_ends_after_a_signal_once_no_node_runs(
    looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for minutes for a node that was dead. A node that saves is waited for."""
    clock = count()
    monkeypatch.setattr("trainyard.launch.ray.time", SimpleNamespace(monotonic=lambda: next(clock)))
    is_running = iter([True] * looks)

    def fit(is_over: Callable[[], bool]) -> None:
        while not is_over():
            pass

    code = _await_end(monkeypatch, fit, [signal.SIGINT], is_running=lambda: next(is_running, False))
    assert code == 130
    assert next(is_running, None) is None
    assert next(clock) < 5 * looks + 20  # seconds of this clock


def _await_end(
    monkeypatch: pytest.MonkeyPatch,
    fit: Callable[[Callable[[], bool]], None],
    signals: list[int],
    codes: dict[int, int] | None = None,
    is_running: Callable[[], bool] = lambda: False,
) -> int:
    """The end of a launcher whose actor answers so."""
    ray = _real_ray()
    from trainyard.launch import ray as launch

    monkeypatch.setattr(ray, "get", lambda value: value)
    answers = {"codes": lambda: codes or {}, "is_running": is_running, "signal": lambda _: None}
    methods = {name: SimpleNamespace(remote=answer) for name, answer in answers.items()}
    return launch._await_end(
        SimpleNamespace(fit_until=fit), SimpleNamespace(**methods), signals, lambda waited_s: None
    )


@pytest.mark.parametrize(
    ("there", "free", "ends"),
    [
        ([1], [1], True),  # a node is missing
        ([1, 1], [1, 0], False),  # others use one: the run waits for its turn
        ([1, 1], [1, 1], True),  # and Ray starts nothing there
    ],
)
def test_a_run_without_nodes_tells_it_and_ends(
    there: list[int],
    free: list[int],
    ends: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """It waited for ever."""
    _real_ray()
    from trainyard.launch.ray import _Waiting

    monkeypatch.setattr("trainyard.launch.ray._nodes", lambda: [{"CPU": cpus} for cpus in there])
    monkeypatch.setattr(
        "trainyard.launch.ray_scaling.free_nodes", lambda: [{"CPU": cpus} for cpus in free]
    )
    waiting = _Waiting({"CPU": 1}, 2)
    for waited_s in (1, 59, 61, 62, 1799):
        waiting.check(waited_s)
    assert capsys.readouterr().err.count("\n") == 1
    if not ends:
        waiting.check(1801)
        return
    with pytest.raises(TrainyardError) as caught:
        waiting.check(1801)
    check(caught.value, "launch.no-ray-nodes", num_nodes=2, wanted="1 CPU, 0 GPUs")


NODES = ("a", "b", "c")


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A policy for workers of 2 CPUs, and what Ray says of three nodes of 4."""
    ray = _real_ray()
    said = SimpleNamespace(dead=set(), lost=set(), leaving={}, group={})
    said.free = dict.fromkeys(NODES, 4.0)
    silent = free_port()
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        port = raylet.getsockname()[1]
        said.nodes = lambda: [
            {
                "NodeID": name,
                "Alive": name not in said.dead,
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": silent if name in said.lost else port,
            }
            for name in NODES
        ]
        yield _scaling_of(said, ray, monkeypatch)


def _scaling_of(
    said: SimpleNamespace, ray: Any, monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    from ray.train import ScalingConfig

    from trainyard.launch import ray_scaling

    cluster = SimpleNamespace(
        state=SimpleNamespace(get_draining_nodes=lambda: said.leaving),
        available_resources_per_node=lambda: {
            name: {"CPU": cpus} if cpus else {} for name, cpus in said.free.items()
        },
    )
    monkeypatch.setattr(ray_scaling, "cluster", cluster)
    monkeypatch.setattr(ray_scaling, "_LOOK_S", 0)
    monkeypatch.setattr(ray, "nodes", said.nodes)
    monkeypatch.setattr(ray.util, "placement_group_table", lambda group: said.group)
    said.asked = []
    client: Any = SimpleNamespace(
        _autoscaling_coordinator="the actor of a dead node",
        maybe_send_resource_request=lambda *_: said.asked.append(
            getattr(client, "_autoscaling_coordinator", "another one")
        ),
    )

    def policy(workers: int | tuple[int, int]) -> ray_scaling.FreeNodes:
        found = ray_scaling.FreeNodes(
            ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 2})
        )
        found._coordinator_client = client
        return found

    said.policy = policy
    return said


@pytest.mark.parametrize(
    ("workers", "change", "wanted"),
    [
        ((1, 4), {}, 4),  # of six places
        ((1, 6), {"dead": {"b"}}, 4),
        ((1, 6), {"leaving": {"a": 0}, "dead": {"b"}}, 2),
        ((1, 6), {"lost": {"b"}}, 4),  # which Ray does not know yet
        ((1, 6), {"free": {"a": 0, "b": 1.0, "c": 3.0}}, 1),  # others have the rest
        ((2, 6), {"free": {"a": 0, "b": 1.0, "c": 3.0}}, None),
        (4, {"dead": {"b"}}, 4),
        (5, {"dead": {"b"}}, None),
    ],
)
def test_a_run_starts_on_the_nodes_that_are_free(
    workers: int | tuple[int, int],
    change: dict[str, Any],
    wanted: int | None,
    scaling: SimpleNamespace,
) -> None:
    """Ray asked an actor, and decided nothing for ever once that actor's node was dead."""
    vars(scaling).update(change)
    decision = scaling.policy(workers).make_decision_for_non_running_worker_group()
    assert getattr(decision, "num_workers", None) == wanted
    assert scaling.asked == ["another one"]


def test_a_run_counts_what_it_holds_itself(scaling: SimpleNamespace) -> None:
    """Its bundles are taken until the next start; Ray moves those of a lost node elsewhere."""
    policy = scaling.policy((1, 6))
    handle = SimpleNamespace(placement_group=object())
    state = SimpleNamespace(placement_group_handle=handle, num_workers=2, start_time=0.0)
    scaling.free = {"a": 2.0, "b": 0, "c": 2.0}
    scaling.group = {
        "bundles": {0: {"CPU": 2.0}, 1: {"CPU": 2.0}},
        "bundles_to_node_id": {0: "a", 1: "c"},
    }
    grown = policy.make_decision_for_running_worker_group(state, None)
    assert grown.num_workers == 4
    again = policy.make_decision_for_running_worker_group(state, None)
    assert not hasattr(again, "num_workers")  # a minute has not passed
    scaling.dead = {"c"}
    assert policy.make_decision_for_non_running_worker_group().num_workers == 2
    assert policy.make_decision_for_non_running_worker_group().num_workers == 1  # Ray has freed it


@pytest.mark.parametrize(
    ("notice_s", "wanted"), [(30, 1010), (None, 1010), (302, 1015), (4000, 4710)]
)
def test_a_drained_node_trains_on_until_there_is_just_time_to_save(
    notice_s: float | None, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saved at once, and was idle until the end of the notice."""
    _real_ray()
    from trainyard.launch import ray_nodes

    clock = SimpleNamespace(now=1000.0)
    deadline = None if notice_s is None else 1000 * (1010 + notice_s)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    def notice() -> SimpleNamespace | None:
        return SimpleNamespace(deadline_ms=deadline) if clock.now >= 1010 else None

    time = SimpleNamespace(sleep=sleep, time=lambda: clock.now)
    monkeypatch.setattr(ray_nodes, "time", time)
    monkeypatch.setattr(ray_nodes, "get_preemption_info", notice)
    sent: list[float] = []
    agent: Any = SimpleNamespace(poll=lambda: None, send_signal=lambda _: sent.append(clock.now))
    drained = Event()
    ray_nodes._save_before_drain(agent, drained)
    assert drained.is_set()
    assert sent == [wanted]


def _real_ray() -> Any:
    pytest.importorskip("ray.train", reason="needs Ray: make .venv/.dev")
    return sys.modules["ray"]
