"""Ranks on nodes of a Ray cluster, by Ray Train, which starts them again after failures.

Ray Train has a worker on each node, which runs the node's agent (see ray_nodes.py). A mistake of
the user's is returned by the workers, not raised, so that Ray Train does not start again.
"""

import argparse
import math
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trainyard.arguments import positive
from trainyard.errors import STOPS, InputError, TrainyardError
from trainyard.installation import install_hint
from trainyard.launch.exit_codes import (
    GRACE_S,
    MISTAKES,
    code_after,
    ending_with,
    first_cause,
    is_stop,
    meaning_of,
)
from trainyard.launch.job import Job, passed_on, shown
from trainyard.launch.launcher import Launcher, add_ranks, add_restarts, record_of
from trainyard.launch.output import take_any_text
from trainyard.launch.signals import KILL_S, handling
from trainyard.printable import how_many, print_line
from trainyard.world import usable_cores

_CONNECT_S = 10
_LEAVE_S = 3.0  # for Ray Train to return the nodes; else it holds them for some minutes
_TELL_S, _NO_NODES_S = 60.0, 1800.0  # without an attempt: until a remark, and until the end
_STORE_BYTES = 100_000_000  # the store stays empty; Ray's minimum is about 80 MB
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # avoids a warning
    "RAY_DEDUP_LOGS": "0",  # nodes may print the same, and each line counts
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a worker stays in the working directory
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",  # nodes that are counted may be dead
}


class Ray(Launcher):
    summary = "a Ray cluster, or one started on this machine"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        where = parser.add_argument_group("where to train")
        add_ranks(where, "each node")
        add = where.add_argument
        add(
            "--address",
            metavar="auto|local|HOST:PORT",
            help="of Ray's head; local: one started on this machine for this run ($RAY_ADDRESS, or "
            "the one that runs here, or local)",
        )
        add("--nodes", type=positive, default=1, metavar="N", help="nodes (1)")
        add("--cpus", type=positive, default=1, metavar="N", help="per rank (1)")
        text = "go on without nodes that are gone"
        add("--min-nodes", type=positive, metavar="N", help=text)
        add_restarts(where)
        add = where.add_mutually_exclusive_group().add_argument
        text = "copy it to all nodes (this one is on all nodes)"
        add("--working-dir", metavar="DIR", help=text)
        text = "Ray's runtime environment, in YAML or JSON"
        add("--runtime-env", metavar="FILE", help=text)

    def plan(self, job: Job, options: argparse.Namespace) -> str:
        ray = _options(job, options)
        ranks = ray.ranks or ray.gpus or "(one per GPU, or 1)"
        return f"{ray.nodes} x a node of Ray: {ranks} x {shown(job.command)}\n"

    def run(self, job: Job, options: argparse.Namespace) -> int:
        return launch_ray(job, _options(job, options))


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    address: str | None = None
    """host:port, or "local" for a new cluster on this machine. None: a running one, else a new one.
    """
    nodes: int = 1
    min_nodes: int | None = None
    """The run goes on with so many nodes; all, if not given."""
    ranks: int | None = None
    """Ranks per node; by default one per GPU, or one."""
    gpus: int | None = None
    """GPUs per node; by default as many as the nodes have, if `ranks` is not given."""
    cpus: int = 1
    """CPUs per rank."""
    restarts: int = 0
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment."""
    is_json: bool = False

    @property
    def folder(self) -> str | None:
        """Working directory of the ranks; None if Ray makes one."""
        return None if "working_dir" in self.environment else os.getcwd()


def _options(job: Job, options: argparse.Namespace) -> RayOptions:
    environment = _environment(options)
    ray = record_of(RayOptions, options, environment=environment, is_json=options.json)
    if ray.folder is None and not job.run.is_absolute():  # Ray deletes its copy at the end
        raise InputError(
            "launch.run-in-working-copy",
            "--run {path}: where the working directory is a copy, on every node another one, give "
            "the run directory from the root on, on storage that all nodes share",
            path=job.run,
        )
    return ray


def _environment(options: argparse.Namespace) -> dict[str, Any]:
    if options.working_dir is not None:
        return {"working_dir": options.working_dir}
    path = options.runtime_env
    if path is None:
        return {}
    import yaml

    reason = "is no mapping in YAML or JSON"
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        content, reason = None, error.strerror or str(error)
    except yaml.YAMLError:
        content = None
    if not isinstance(content, dict):
        raise InputError(
            "launch.runtime-env-unusable",
            "--runtime-env {path}: {reason}",
            path=path,
            reason=reason,
        )
    return content


def launch_ray(job: Job, options: RayOptions) -> int:
    """Run a job on nodes of Ray. Returns the exit code of the run.

    Signals that end a run are passed on to the ranks, which save a checkpoint first. InputError if
    there is no such cluster, or its nodes are too few; TrainyardError if a rank was killed, a node
    lost more often than `restarts`, or ranks could not save after a signal.
    """
    with connected(options):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        try:
            from trainyard.launch.ray_nodes import Board
            from trainyard.launch.ray_scaling import free_nodes

            free_nodes()
        except (ImportError, AttributeError) as error:
            reason = f"{error}".partition("\n")[0]
            raise InputError(
                "launch.other-ray",
                "Ray {version} has other parts than Ray 2.58 to 2.60 ({reason}): install one of "
                "these",
                version=ray.__version__,
                reason=reason,
            ) from None
        take_any_text()
        bundle = _bundle(options)
        this_node = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        board = ray.remote(num_cpus=0, scheduling_strategy=this_node)(Board).remote()
        signals: list[int] = []
        with (
            tempfile.TemporaryDirectory() as folder,
            handling(STOPS, lambda number, frame: signals.append(number)),
        ):
            trainer = _trainer(job, options, bundle, board=board, folder=folder)
            waiting = _Waiting(bundle, options.min_nodes or options.nodes)
            return _await_end(trainer, board, signals, waiting.check)


def _trainer(
    job: Job, options: RayOptions, bundle: Mapping[str, int], *, board: Any, folder: str
) -> Any:
    """Ray Train's trainer; it has nothing to keep in its `folder`."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from trainyard.launch.ray_nodes import Attempts, Trainer, run_node

    nodes, fewest = options.nodes, options.min_nodes or options.nodes
    has_gpus = "GPU" in bundle
    settings = {
        "board": board,
        "words": [*job.of_agent().arguments, "--ray"],
        "folder": options.folder,
        "ranks": options.ranks or bundle.get("GPU", 0) or 1,
        # Hides GPUs that were not reserved.
        "variables": passed_on(os.environ) | ({} if has_gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    return Trainer(
        partial(run_node, settings),  # Ray's dashboard shows a train_loop_config, with its tokens
        backend_config=Attempts(board),
        scaling_config=ScalingConfig(
            num_workers=nodes if fewest == nodes else (fewest, nodes),
            use_gpu=has_gpus,
            resources_per_worker=dict(bundle),
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            storage_path=folder, failure_config=FailureConfig(max_failures=options.restarts)
        ),
    )


def _await_end(trainer: Any, board: Any, signals: list[int], check: Callable[[float], None]) -> int:
    """Run until the end. Returns the exit code. `signals` grows with each signal that arrives.

    `check` gets the seconds for which no node has run.
    """
    import ray

    failure, watch = "", _Watch(board, signals, check)
    try:
        trainer.fit_until(watch.is_over)
    except TrainyardError:
        raise
    except Exception as error:  # Ray's own, or one of a worker's
        failure = f"{error}".strip().splitlines()[-1]
    codes = ray.get(board.codes.remote())
    if watch.passed:
        return code_after(
            signals[watch.passed - 1], codes, lambda node, _: f"see the output of node {node}"
        )
    _, code = first_cause(codes) if codes else (0, 0)
    if failure and code not in MISTAKES:  # nodes that are left may have saved
        code = TrainyardError.exit_code if is_stop(code) else code
        raise ending_with(
            code,
            TrainyardError(
                "launch.no-restart-left", "no restart is left: {reason}", reason=failure
            ),
        )
    return meaning_of(code)


class _Watch:
    """Passes signals on to the nodes, and says when a run is over though Ray has not ended it."""

    def __init__(self, board: Any, signals: list[int], check: Callable[[float], None]) -> None:
        self._board, self._signals, self._check = board, signals, check
        self.passed = 0  # of the signals
        self._give_up_at, self._ran_at = math.inf, time.monotonic()

    def is_over(self) -> bool:
        import ray

        for number in self._signals[self.passed :]:
            ray.get(self._board.signal.remote(number))
            is_impatient = self.passed and number == signal.SIGINT
            self._give_up_at = time.monotonic() + (KILL_S if is_impatient else GRACE_S)
            self._ran_at = time.monotonic()
            self.passed += 1
        is_running = ray.get(self._board.is_running.remote())
        now = time.monotonic()
        if is_running:
            self._ran_at = now
        elif not self.passed:
            self._check(now - self._ran_at)
        return now >= self._give_up_at or bool(self.passed and now - self._ran_at > _LEAVE_S)


# --- the connection to Ray ---


@contextmanager
def connected(options: RayOptions) -> Iterator[None]:
    """Inside, Ray is connected to a cluster; one that is started here ends with it.

    Ray prints what its workers print, with the worker in front, unless it is JSON. InputError if
    there is no such cluster, or Ray is not installed.
    """
    for name, text in _VARIABLES.items():
        os.environ.setdefault(name, text)
    try:
        import ray
    except ImportError:
        raise InputError(
            "launch.needs-ray", "this needs Ray: {hint}", hint=install_hint("ray")
        ) from None

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
        raise InputError(
            "launch.ray-failed", "Ray at {address}: {reason}", address=address, reason=first_line
        ) from None
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
            "launch.ray-unreachable",
            "no Ray answers at {address} ({reason}): give the address of its head, with the port "
            "that `ray start --head` was given, 6379 if none",
            address=address,
            reason=error.strerror or str(error),
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
    if options.is_json:
        more["logging_config"] = ray.LoggingConfig()  # no prefix, so that programs read the lines
    ray.init(
        address,
        logging_level="ERROR",
        runtime_env=dict(options.environment),
        **more,
    )


# --- the nodes ---


class _Waiting:
    """Tells once, while a run waits for nodes, what is missing, and ends it after a limit."""

    def __init__(self, bundle: Mapping[str, int], fewest: int) -> None:
        self._bundle, self._fewest = bundle, fewest
        self._is_told = False

    def check(self, waited_s: float) -> None:
        """TrainyardError after the limit, unless others only use the nodes."""
        self._is_told &= waited_s > _TELL_S
        if waited_s <= _TELL_S or (self._is_told and waited_s <= _NO_NODES_S):
            return
        from trainyard.launch.ray_scaling import fitting, free_nodes

        alive, free = _nodes(), free_nodes()
        is_there = fitting(alive, self._bundle) >= self._fewest
        error = TrainyardError(
            "launch.no-ray-nodes",
            "no node has run for {seconds} of {limit} s: {num_nodes} x ({wanted}) are asked for, "
            "and Ray has {found}; start nodes, or give the command again when they are back",
            seconds=round(waited_s),
            limit=round(_NO_NODES_S),
            num_nodes=self._fewest,
            wanted=_words(self._bundle),
            found=f"{_listed(free)} free" if is_there else _listed(alive),
        )
        if waited_s <= _NO_NODES_S:
            print_line(f"{error}")
            self._is_told = True
        elif not is_there or fitting(free, self._bundle) >= self._fewest:
            raise error


def _bundle(options: RayOptions) -> dict[str, int]:
    """Resources to reserve on each node. InputError, which lists what there is, if too few fit."""
    nodes = _nodes()
    gpus = options.gpus
    if gpus is None:
        gpus_of = sorted((int(node.get("GPU", 0)) for node in nodes), reverse=True)
        gpus = 0 if options.ranks or len(gpus_of) < options.nodes else gpus_of[options.nodes - 1]
    bundle = {"CPU": (options.ranks or gpus or 1) * options.cpus} | ({"GPU": gpus} if gpus else {})
    fit = [
        node for node in nodes if all(node.get(name, 0) >= count for name, count in bundle.items())
    ]
    if len(fit) < options.nodes:
        raise InputError(
            "launch.too-few-ray-nodes",
            "{num_nodes} x ({wanted}) are asked for, and Ray has nodes with {found}: "
            "{num_missing} missing",
            num_nodes=options.nodes,
            wanted=_words(bundle),
            found=_listed(nodes),
            num_missing=options.nodes - len(fit),
        )
    return bundle


def _nodes() -> list[dict[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _listed(nodes: Iterable[Mapping[str, float]]) -> str:
    counts = Counter(_words(node) for node in nodes)
    return ", ".join(f"{count} x ({words})" for words, count in counts.items())


def _words(resources: Mapping[str, float]) -> str:
    cpus, gpus = (int(resources.get(name, 0)) for name in ("CPU", "GPU"))
    return f"{how_many(cpus, 'CPU')}, {how_many(gpus, 'GPU')}"
