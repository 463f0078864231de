"""The nodes that Ray provides to `trainyard launch ray`."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trainyard.errors import InputError, TrainyardError
from trainyard.launch.answers import answers, forget, pause
from trainyard.launch.attempts import Host, HostsGone, passed_on
from trainyard.launch.events import Events
from trainyard.launch.ranks import Share, shares_of
from trainyard.launch.ray_node import CONCURRENT, Node, RayHost, why_lost
from trainyard.launch.readiness import as_text, differences, installed

_ANSWER_S = 60  # for an actor and its agent to start, with Python on a slow file system
_LOOK_S = 0.2
_PATIENCE_S = 2.0  # before the first message about waiting

Say = Callable[[str], None]


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


@contextmanager
def placed(
    command: Sequence[str], options: RayOptions, events: Events, say: Say
) -> "Iterator[RayCluster]":
    """The requested number of nodes, released at the end.

    InputError if there are too few, or they lack something.
    """
    from ray.util import placement_group, remove_placement_group

    bundle = _bundle(options)
    group = placement_group([bundle] * options.nodes, strategy="STRICT_SPREAD")
    cluster = RayCluster(command, options, events, say=say, group=group)
    try:
        cluster.check()
        yield cluster
    finally:
        cluster.close()
        remove_placement_group(group)


def _bundle(options: RayOptions) -> dict[str, int]:
    """Resources to reserve on each node. InputError, which lists what there is, if too few fit."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    gpus = options.gpus
    if gpus is None:
        most = sorted((int(node["Resources"].get("GPU", 0)) for node in nodes), reverse=True)
        gpus = 0 if options.ranks or len(most) < options.nodes else most[options.nodes - 1]
    bundle = {"CPU": (options.ranks or gpus or 1) * options.cpus} | ({"GPU": gpus} if gpus else {})
    fit = [
        node
        for node in nodes
        if all(node["Resources"].get(name, 0) >= count for name, count in bundle.items())
    ]
    if len(fit) < options.nodes:
        there = Counter(_words(node["Resources"]) for node in nodes)
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

    # --- called by `supervise` ---

    def shares(self) -> dict[str, Share]:
        gone = {host.name: host.gone for host in self._taken.values() if host.gone}
        if gone:
            raise HostsGone(gone)
        first = self._taken[min(self._taken)]
        gpus = self._group.bundle_specs[0].get("GPU", 0)
        ranks = self._options.ranks or int(gpus) or 1
        own = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}  # hides GPUs that were not reserved
        return shares_of(
            self._command,
            dict.fromkeys(self.hosts, ranks),
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

    def close(self) -> None:
        self.leave_out(dict.fromkeys(self.hosts, ""))

    # --- actors ---

    def _take(self, numbers: Sequence[int]) -> Mapping[str, str]:
        """Start an actor for each of these bundles. Returns the problems of those not ready."""
        for number, (actor, node) in self._placed(numbers).items():
            address = node["NodeManagerAddress"]
            self._taken[number] = RayHost(actor, _name(node), address, self._events)
        new = [self._taken[number].name for number in numbers]
        facts, problems = answers(self._events, new, _ANSWER_S, lambda count: None)
        return {**problems, **(differences(facts, installed()) if facts else {})}

    def _placed(self, numbers: Sequence[int]) -> dict[int, tuple[Any, dict[str, Any]]]:
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
        kind = ray.remote(max_concurrency=CONCURRENT)(Node).options(
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
