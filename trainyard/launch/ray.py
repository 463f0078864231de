"""Ranks on nodes of a Ray cluster, with an actor on each that runs an agent (see agent.py).

The agent is a process of its own, so that its ranks are not children of the actor: Ray kills an
actor's children without warning when it ends the actor.
"""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from trainyard.children import SAFE_PATH
from trainyard.distributed.interfaces import free_port
from trainyard.errors import InputError, TrainyardError
from trainyard.installation import install_hint
from trainyard.launch.events import Events, Gone, answers, event_of, forget, passing_signals, pause
from trainyard.launch.host_agent import PING_S
from trainyard.launch.job import Job, Say, passed_on
from trainyard.launch.output import Printer
from trainyard.launch.preflight import as_text, differences, installed
from trainyard.launch.ranks import Share, shares_of
from trainyard.launch.supervisor import Host, HostsGone, Policy, supervise
from trainyard.world import began_with, usable_cores

_CONNECT_S = 10
_ANSWER_S = 60  # for an actor and its agent to start, with Python on a slow file system
_LOOK_S = 0.2
_PATIENCE_S = 2.0  # before the first message about waiting
_STORE_BYTES = 100_000_000  # the store stays empty; Ray's minimum is about 80 MB
_CONCURRENT = 4  # calls of a Node, of which one waits for messages
_CAUSES = {
    "its node has died": "its node has died",
    "its worker process has died": "its actor was killed",
    "is unavailable": "it is not reached",
}
_ERROR = re.compile(r"\s*\w*Error: ")


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    address: str | None = None
    """host:port, or "local" for a new cluster on this machine. None: a running one, else a new one.
    """
    nodes: int = 1
    ranks: int | None = None
    """Ranks per node; by default one per GPU, or one."""
    gpus: int | None = None
    """GPUs per node; by default as many as the nodes have, if `ranks` is not given."""
    cpus: int = 1
    """CPUs per rank."""
    wait_s: float = 300
    """Seconds to wait for busy resources, or for a lost node to be back."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment."""
    is_json: bool = False

    @property
    def folder(self) -> str | None:
        """Working directory of the ranks; None if Ray makes one."""
        return None if "working_dir" in self.environment else os.getcwd()


def launch_ray(job: Job, options: RayOptions, policy: Policy, say: Say) -> int:
    """Run a job on nodes of Ray. Returns the exit code of the run.

    InputError if there is no such cluster, or its nodes are too few or lack something.
    """
    events = Events()
    with (
        connected(options),
        passing_signals(events),
        _placed(job.command, options, events, say) as cluster,
    ):
        printer = Printer(cluster.hosts, as_they_are=options.is_json)
        return supervise(
            cluster,
            events,
            policy,
            show=lambda host, line: printer.line(host, line.text, is_error=line.is_error),
            say=say,
        )


# --- the connection to Ray ---


@contextmanager
def connected(options: RayOptions) -> Iterator[None]:
    """Inside, Ray is connected to a cluster; one that is started here ends with it.

    InputError if there is no such cluster, or Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # avoids a warning
    try:
        import ray
    except ImportError:
        raise InputError(f"this needs Ray: {install_hint('ray')}") from None

    given = options.address or os.environ.get("RAY_ADDRESS")
    address = given or "auto"
    _check_answer(address)
    try:
        try:
            _join(address, options)
        except ConnectionError:
            if given:
                raise
            _join("local", options)
        yield
    except (ConnectionError, RuntimeError, ValueError) as error:
        if ray.is_initialized():
            raise
        first_line = str(error).strip().partition("\n")[0]  # for instance of a version mismatch
        raise InputError(f"Ray at {address}: {first_line}") from None
    finally:
        ray.shutdown()


def _check_answer(address: str) -> None:
    """InputError at once if nothing answers; Ray itself tries for a minute."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise InputError(
            f"no Ray answers at {address} ({error.strerror or error}): give the address of its "
            "head, with the port that `ray start --head` was given, 6379 if none"
        ) from None


def _join(address: str, options: RayOptions) -> None:
    import ray

    more: dict[str, Any] = {}
    if address == "local":
        cores = usable_cores()
        more = {
            "num_cpus": max(cores, (options.ranks or options.gpus or 1) * options.cpus),
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    environment = dict(options.environment)
    ray.init(address, log_to_driver=False, logging_level="ERROR", runtime_env=environment, **more)


# --- the nodes ---


@contextmanager
def _placed(
    command: Sequence[str], options: RayOptions, events: Events, say: Say
) -> "Iterator[RayCluster]":
    """The requested number of nodes, released at the end."""
    from ray.util import placement_group, remove_placement_group

    bundle = _bundle(options)
    group = placement_group([bundle] * options.nodes, strategy="STRICT_SPREAD")
    cluster = RayCluster(command, options, events, say=say, group=group)
    try:
        cluster.check()
        yield cluster
    finally:
        cluster.leave_out(dict.fromkeys(cluster.hosts, ""))
        remove_placement_group(group)


def _bundle(options: RayOptions) -> dict[str, int]:
    """Resources to reserve on each node. InputError, which lists what there is, if too few fit."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = options.gpus
    if gpus is None:
        most = sorted((int(node.get("GPU", 0)) for node in nodes), reverse=True)
        gpus = 0 if options.ranks or len(most) < options.nodes else most[options.nodes - 1]
    bundle = {"CPU": (options.ranks or gpus or 1) * options.cpus} | ({"GPU": gpus} if gpus else {})
    fit = [
        node for node in nodes if all(node.get(name, 0) >= count for name, count in bundle.items())
    ]
    if len(fit) < options.nodes:
        there = Counter(_words(node) for node in nodes)
        listed = ", ".join(f"{count} x ({words})" for words, count in there.items())
        raise InputError(
            f"{options.nodes} x ({_words(bundle)}) are asked for, and Ray has nodes with {listed}: "
            f"{options.nodes - len(fit)} missing"
        )
    return bundle


def _words(resources: Mapping[str, float]) -> str:
    cpus, gpus = (int(resources.get(name, 0)) for name in ("CPU", "GPU"))
    return f"{cpus} CPU{'s' * (cpus != 1)}, {gpus} GPU{'s' * (gpus != 1)}"


class RayCluster:
    """Ray nodes with an actor on each."""

    def __init__(
        self, command: Sequence[str], options: RayOptions, events: Events, *, say: Say, group: Any
    ) -> None:
        self._command, self._options, self._events = command, options, events
        self._say, self._group = say, group
        self._taken: dict[int, RayHost] = {}  # by bundle index

    @property
    def hosts(self) -> Mapping[str, Host]:
        return {host.name: host for _, host in sorted(self._taken.items())}

    def check(self) -> None:
        """Start an actor on each node. InputError, with a line for each node that is not ready."""
        problems = self._take(range(self._options.nodes))
        if problems:
            raise InputError(as_text(problems, self._options.nodes))

    def shares(self) -> dict[str, Share]:
        gone = {host.name: host.gone for host in self._taken.values() if host.gone}
        if gone:
            raise HostsGone(gone)
        first = self._taken[min(self._taken)]
        gpus = int(self._group.bundle_specs[0].get("GPU", 0))
        own = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}  # hides GPUs that were not reserved
        return shares_of(
            self._command,
            dict.fromkeys(self.hosts, self._options.ranks or gpus or 1),
            address=first.address,
            port=first.free_port(),
            variables=passed_on(os.environ) | own,
        )

    def leave_out(self, gone: Mapping[str, str]) -> None:
        for number, host in list(self._taken.items()):
            if host.name in gone:
                host.close()
                del self._taken[number]

    def bring_back(self, gone: Mapping[str, str]) -> None:
        """Waits for these nodes or for replacements."""
        numbers = [number for number, host in self._taken.items() if host.name in gone]
        self.leave_out(gone)
        forget(self._events)
        deadline = time.monotonic() + _ANSWER_S
        while True:
            try:
                problems = self._take(numbers)
                break
            except InputError:  # Ray takes a while to notice that a node has died
                if time.monotonic() > deadline:
                    raise
                pause(self._events, _LOOK_S)
        if problems:
            raise HostsGone(problems)

    def _take(self, numbers: Sequence[int]) -> Mapping[str, str]:
        """Start an actor for each of these bundles. Returns the problems of those not ready."""
        for number, (actor, node) in self._actors(numbers).items():
            address = node["NodeManagerAddress"]
            self._taken[number] = RayHost(actor, _name(node), address, self._events)
        new = [self._taken[number].name for number in numbers]
        facts, problems = answers(self._events, new, _ANSWER_S)
        return problems | differences(facts, installed())

    def _actors(self, numbers: Sequence[int]) -> dict[int, tuple[Any, dict[str, Any]]]:
        """An actor for each of these bundles, and Ray's record of its node."""
        import ray
        from ray.exceptions import RayError

        actors = {number: self._actor(number) for number in numbers}
        calls = {number: actor.node.remote() for number, actor in actors.items()}
        self._await(list(calls.values()))
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        try:
            return {number: (actors[number], nodes[ray.get(calls[number])]) for number in numbers}
        except RayError as error:
            for actor in actors.values():
                ray.kill(actor)
            raise InputError(f"a node of Ray is not ready: {why_lost(error)}") from None

    def _actor(self, number: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._group.bundle_specs[number]
        kind = ray.remote(max_concurrency=_CONCURRENT)(Node).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            ),
        )
        return kind.remote(self._options.folder)

    def _await(self, calls: list[Any]) -> None:
        """Wait until Ray has finished these calls. Raises Stopped if a signal arrives."""
        import ray
        from ray.util import placement_group_table

        wait_s, began, has_said = self._options.wait_s, time.monotonic(), False
        what = f"{len(calls)} x ({_words(self._group.bundle_specs[0])}), each on a node of its own"
        while ray.wait(calls, num_returns=len(calls), timeout=0)[1]:
            pause(self._events, _LOOK_S)
            waited_s = time.monotonic() - began
            if waited_s > wait_s:
                raise TrainyardError(f"Ray has had no {what}, free within {wait_s:.0f} s")
            is_late = waited_s > _PATIENCE_S and not has_said
            if is_late and placement_group_table(self._group)["state"] != "CREATED":
                has_said = True
                self._say(f"waiting for Ray to have {what}, free")


def _name(node: Mapping[str, Any]) -> str:
    """The node's host name; its address if several nodes share that name."""
    import ray

    host = str(node["NodeManagerHostname"])
    same = [each for each in ray.nodes() if each["Alive"] and each["NodeManagerHostname"] == host]
    return host if len(same) == 1 else str(node["NodeManagerAddress"])


class RayHost:
    """A node through its actor: messages of the agent become events.

    The first event is an Answer with the installed versions. If the node is lost, the last is Gone.
    """

    def __init__(self, actor: Any, name: str, address: str, events: Events) -> None:
        self.name, self.address, self.gone = name, address, ""
        self._actor, self._events, self._is_closed = actor, events, False
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def start(self, share: Share) -> None:
        self._actor.order.remote({"do": "start", "share": asdict(share)})

    def signal(self, number: int) -> None:
        self._actor.order.remote({"do": "signal", "number": int(number)})

    def free_port(self) -> int:
        import ray
        from ray.exceptions import RayError

        try:
            return int(ray.get(self._actor.free_port.remote()))
        except RayError as error:
            raise HostsGone({self.name: why_lost(error)}) from None

    def close(self) -> None:
        """End the actor; its remaining ranks save and end too."""
        import ray

        self._is_closed = True
        ray.kill(self._actor)
        self._thread.join()

    def _listen(self) -> None:
        import ray
        from ray.exceptions import RayError

        why = "its agent has ended"
        try:
            while messages := ray.get(self._actor.messages.remote()):
                for message in messages:
                    if (event := event_of(message, self.name)) is not None:
                        self._events.put(event)
        except RayError as error:
            why = why_lost(error)
        if not self._is_closed:
            self.gone = why
            self._events.put(Gone(self.name, why))


def why_lost(error: Exception) -> str:
    """A short form of Ray's long message about an actor that is lost or could not start."""
    text = str(error)
    known = (short for words, short in _CAUSES.items() if words in text)
    errors = [line for line in text.splitlines() if _ERROR.match(line)]
    return next(known, (errors or text.splitlines() or ["lost"])[-1].strip())


class Node:
    """The actor: passes orders to the agent and its messages back."""

    def __init__(self, folder: str | None) -> None:
        """`folder`: the working directory; None keeps the one that Ray made."""
        if folder is not None:
            os.chdir(folder)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT, and children inherit it
        if "OMP_NUM_THREADS" not in began_with(os.getpid()):  # Ray's: the CPUs of all ranks here
            os.environ.pop("OMP_NUM_THREADS", None)
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # one order at a time
        self._agent = subprocess.Popen(
            [sys.executable, *SAFE_PATH, "-m", "trainyard.launch.host_agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for work in (self._ping, self._listen):
            threading.Thread(target=work, daemon=True).start()

    def node(self) -> str:
        """Ray's id of this node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def free_port(self) -> int:
        return free_port()

    def order(self, order: dict[str, Any]) -> None:
        if order["do"] == "start":  # runs Ray's Python on this node
            order["share"]["command"] = (sys.executable, *order["share"]["command"][1:])
        assert self._agent.stdin
        with self._lock, suppress(OSError):
            self._agent.stdin.write(json.dumps(order).encode() + b"\n")
            self._agent.stdin.flush()

    def messages(self) -> list[dict[str, Any]]:
        """The agent's next messages; waits for at least one. Empty once the agent has ended."""
        messages = [self._messages.get()]
        while not self._messages.empty():
            messages.append(self._messages.get())
        return [message for message in messages if message is not None]

    def _listen(self) -> None:
        assert self._agent.stdout
        for line in self._agent.stdout:
            self._messages.put(json.loads(line))
        self._messages.put(None)

    def _ping(self) -> None:
        while self._agent.poll() is None:
            self.order({"do": "ping"})
            time.sleep(PING_S)
