"""What runs on the nodes of Ray: a worker of Ray Train on each, which runs the node's agent.

The agent (see elastic.py) is a process of its own, which can handle signals. Ray kills a worker's
children without warning, but not their children: ranks whose agent is gone save and end.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train import get_context, get_preemption_info
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainyard.children import SAFE_PATH
from trainyard.distributed.interfaces import free_port
from trainyard.errors import Requeued
from trainyard.launch.exit_codes import GRACE_S, MISTAKES, is_final
from trainyard.launch.ray_scaling import FreeNodes, nodes_that_answer
from trainyard.parent import LAUNCHER, STARTS_BEFORE
from trainyard.world import began_with

_LOOK_S, _WATCH_S, _LOST_LOOK_S = 0.5, 0.2, 1.0
_DRAIN_LOOK_S = 5.0  # as often as Ray Train looks for draining nodes
_SILENCE_S = 5.0  # of a node, or of its worker, that is dead
_ADDRESS, _PORT = "PET_MASTER_ADDR", "PET_MASTER_PORT"  # see elastic.in_pod

_CLEANER = "PlacementGroupCleanerCallback"

_agents: "list[subprocess.Popen[bytes]]" = []
"""Of this worker: none or one."""


class Board:
    """An actor between the launcher and the nodes: signals one way, exit codes the other."""

    def __init__(self) -> None:
        self._signals: list[int] = []
        self._codes: dict[int, int] = {}
        self._heard: dict[int, float] = {}  # when each node that runs has asked for signals
        self._attempts = 0

    def begin(self, nodes: int) -> int:
        """Begin an attempt: its number, from 1; 0 if none may, after a signal or a mistake."""
        if self._signals or any(code in MISTAKES for code in self._codes.values()):
            return 0
        self._codes, self._heard = {}, dict.fromkeys(range(nodes), time.monotonic())
        self._attempts += 1
        return self._attempts

    def end(self, node: int, code: int) -> None:
        self._codes[node] = code
        self._heard.pop(node, None)

    def over(self) -> None:
        """The attempt is over, also on nodes that are lost."""
        self._heard = {}

    def signal(self, number: int) -> None:
        self._signals.append(number)

    def signals(self, node: int) -> list[int]:
        """All signals so far, for a node that is alive."""
        if node in self._heard:
            self._heard[node] = time.monotonic()
        return self._signals

    def codes(self) -> dict[int, int]:
        """Of the nodes that have ended, in the last attempt."""
        return self._codes

    def is_running(self) -> bool:
        """Whether a node of the attempt has not ended, and is heard of."""
        since = time.monotonic() - _SILENCE_S
        return any(heard > since for heard in self._heard.values())


class Trainer(DataParallelTrainer):  # type: ignore[misc]
    """Ray Train's trainer, which counts the nodes by itself (see ray_scaling.py), and without an
    actor that outlives the run.

    The actor removes resources of a run that is gone, as Ray does anyway at the end of a job. On a
    cluster without a dashboard it cannot know that the run is gone, and complains every second.
    """

    def fit_until(self, is_over: Callable[[], bool]) -> None:
        """Train in the main thread, which handles signals, until `is_over`. Errors are Ray's."""
        self._is_over = is_over
        self.fit()

    def _initialize_and_run_controller(self, **parts: Any) -> Any:
        """Ray's own waits in one call: a thread in it ends the process once Ray is shut down."""
        node = ray.get_runtime_context().get_node_id()
        this_node = NodeAffinitySchedulingStrategy(node, soft=False)
        variables = {"env_vars": get_env_vars_to_propagate()}
        actor = ray.remote(num_cpus=0, scheduling_strategy=this_node, runtime_env=variables)
        policy = FreeNodes(self.scaling_config)
        controller = actor(TrainController).remote(**parts | {"scaling_policy": policy})
        running = controller.run.remote()
        while not ray.wait([running], timeout=_WATCH_S)[0]:
            if self._is_over():
                return SimpleNamespace(error=None)
        ray.get(running)
        return ray.get(controller.get_result.remote())

    def _create_default_callbacks(self) -> list[Any]:
        return [
            callback
            for callback in super()._create_default_callbacks()
            if type(callback).__name__ != _CLEANER
        ]


@dataclass
class Attempts(BackendConfig):  # type: ignore[misc]
    """Ray Train's backend, which prepares the attempts and ends them."""

    board: Any = None

    @property
    def backend_cls(self) -> type[Backend]:
        return _Attempt


class _Attempt(Backend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: Attempts) -> None:
        """Have the nodes meet at a port of the first one, if they are to start at all."""
        if attempt := ray.get(backend_config.board.begin.remote(len(worker_group))):
            point = worker_group.execute_single(0, _meeting_point)
            worker_group.execute(_prepare, *point, attempt - 1)

    def on_shutdown(self, worker_group: Any, backend_config: Attempts) -> None:
        """Let the ranks save before Ray Train kills the workers: another node failed, or came."""
        ends, deadline = worker_group.execute_async(_end_agent), time.monotonic() + GRACE_S
        nodes = [worker.metadata.node_id for worker in worker_group.get_workers()]
        node_of = dict(zip(ends, nodes, strict=True))
        while ends and time.monotonic() < deadline:  # Ray asks a lost node until it is known dead
            _, left = ray.wait(ends, num_returns=len(ends), timeout=_LOST_LOOK_S)
            there = nodes_that_answer() if left else set()
            ends = [end for end in left if node_of[end] in there]
        ray.get(backend_config.board.over.remote())


def _meeting_point() -> tuple[str, int]:
    return get_node_ip_address(), free_port()


def _prepare(address: str, port: int, before: int) -> None:
    os.environ.update({_ADDRESS: address, _PORT: str(port), STARTS_BEFORE: str(before)})


def _end_agent() -> None:
    for agent in _agents:
        agent.terminate()
        agent.wait()


def run_node(settings: Mapping[str, Any]) -> None:
    """Run the agent of this node. RuntimeError if another start may help.

    RayActorError, which Ray does not count, if the ranks have saved as a node is drained.
    """
    if _ADDRESS not in os.environ:
        return
    context, board, sent = get_context(), settings["board"], 0
    node = context.get_world_rank()
    agent = _start_agent(settings, node, context.get_world_size())
    _agents.append(agent)
    drained = threading.Event()
    threading.Thread(target=_save_before_drain, args=(agent, drained), daemon=True).start()
    while not _has_ended(agent):
        for number in ray.get(board.signals.remote(node))[sent:]:
            agent.send_signal(number)
            sent += 1
    code = agent.returncode
    ray.get(board.end.remote(node, code))
    if drained.is_set() and code == Requeued.exit_code:
        raise RayActorError(error_msg=f"node {node} has saved", preempted=True)
    if not is_final(code):
        raise RuntimeError(f"node {node} has ended with exit code {code}")


def _start_agent(
    settings: Mapping[str, Any], node: int, num_nodes: int
) -> "subprocess.Popen[bytes]":
    environment = dict(os.environ)
    if "OMP_NUM_THREADS" not in began_with(os.getpid()):  # Ray's: the CPUs of all ranks here
        environment.pop("OMP_NUM_THREADS", None)
    environment |= settings["variables"]
    environment |= {"PYTHONUNBUFFERED": "1", "FORCE_COLOR": "", LAUNCHER: str(os.getpid())}
    environment |= {"PET_NODE_RANK": str(node), "PET_NNODES": str(num_nodes)}
    environment |= {"PET_NPROC_PER_NODE": str(settings["ranks"])}
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT, and children inherit it
    return subprocess.Popen(
        [sys.executable, *SAFE_PATH, "-m", "trainyard", *settings["words"]],
        cwd=settings["folder"],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _has_ended(agent: "subprocess.Popen[bytes]") -> bool:
    try:
        agent.wait(_LOOK_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _save_before_drain(agent: "subprocess.Popen[bytes]", drained: threading.Event) -> None:
    """Have all ranks save in time once Ray drains a node of the run.

    They train on until GRACE_S before the node is taken back. A collective call of all workers.
    """
    while agent.poll() is None:
        if (notice := get_preemption_info()) is not None:
            drained.set()
            deadline = (notice.deadline_ms or 0) / 1000  # none is given: Ray waits for two minutes
            if deadline - time.time() <= GRACE_S:
                agent.send_signal(signal.SIGUSR1)
                return
        time.sleep(_DRAIN_LOOK_S)
