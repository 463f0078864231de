"""On how many nodes of Ray a run starts: on those that are there and free.

Ray's own policies ask an actor, which lies on the node of the cluster's first driver. After the
death of that node they decide nothing, for ever (Ray 2.60).
"""

import math
import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray._private import state as cluster
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingPolicy,
)

_LOOK_S = 1.0
_ANSWER_S, _ASKED = 2.0, 64  # seconds for a node to answer; nodes that are asked at a time


def nodes_that_answer() -> set[str]:
    """Their ids. Ray calls a node alive for some time after its death, up to half a minute."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    with ThreadPoolExecutor(_ASKED) as pool:
        found = [*pool.map(_answers, nodes)]
    return {node["NodeID"] for node, answers in zip(nodes, found, strict=True) if answers}


def _answers(node: Mapping[str, Any]) -> bool:
    """Whether the node's raylet takes a connection."""
    try:
        point = node["NodeManagerAddress"], node["NodeManagerPort"]
        socket.create_connection(point, _ANSWER_S).close()
    except OSError:
        return False
    return True


def free_nodes(group: Any = None) -> list[dict[str, float]]:
    """What each node has to give; a node that is drained has nothing.

    The bundles of `group`, a placement group, count as free.
    """
    leaving = cluster.state.get_draining_nodes()
    alive = nodes_that_answer().difference(leaving)
    available = cluster.available_resources_per_node()
    free = {node: dict(available.get(node, {})) for node in alive}
    table = ray.util.placement_group_table(group) if group else {}
    for bundle, node in table.get("bundles_to_node_id", {}).items():
        for name, count in table["bundles"][bundle].items() if node in free else ():
            free[node][name] = free[node].get(name, 0) + count
    return list(free.values())


def fitting(nodes: Iterable[Mapping[str, float]], bundle: Mapping[str, float]) -> int:
    """How often a bundle fits into the resources of nodes."""
    return sum(min(int(node.get(name, 0) // bundle[name]) for name in bundle) for node in nodes)


class FreeNodes(ScalingPolicy):  # type: ignore[misc]
    """Starts as many workers as fit, and none below the minimum; grows once more fit."""

    def __init__(self, scaling_config: Any) -> None:
        super().__init__(scaling_config)
        self._group: Any = None  # the placement group of the workers
        self._looked_at = -math.inf

    def make_decision_for_non_running_worker_group(self) -> Any:
        self._maybe_send_resource_request()
        num_workers = self._possible()
        if num_workers < self.scaling_config.min_workers:
            time.sleep(_LOOK_S)  # Ray asks again at once
            return NoopDecision()
        self._group = None  # Ray removes it before the start
        return self._resized(num_workers)

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> Any:
        self._maybe_send_resource_request()
        self._group = worker_group_state.placement_group_handle.placement_group
        since = max(worker_group_state.start_time, self._looked_at)
        if time.monotonic() - since < self.scaling_config.elastic_resize_monitor_interval_s:
            return NoopDecision()
        self._looked_at = time.monotonic()
        num_workers = self._possible()
        if num_workers <= worker_group_state.num_workers:
            return NoopDecision()
        return self._resized(num_workers)

    def _possible(self) -> int:
        fit = fitting(free_nodes(self._group), self.scaling_config._resources_per_worker_not_none)
        return min(fit, int(self.scaling_config.max_workers))

    def _resized(self, num_workers: int) -> Any:
        bundle = self.scaling_config._resources_per_worker_not_none
        return ResizeDecision(num_workers=num_workers, resources_per_worker=bundle)

    # --- what Ray's autoscaler is told: it may start nodes ---

    def _get_num_workers_for_resource_request(self) -> int:
        return int(self.scaling_config.max_workers)

    def _maybe_send_resource_request(self) -> None:
        self._find_coordinator()
        super()._maybe_send_resource_request()

    def _cancel_resource_request(self) -> None:
        self._find_coordinator()
        super()._cancel_resource_request()

    def _find_coordinator(self) -> None:
        """Let Ray look the actor up again: it is another one after the death of its node."""
        client: Any = self._coordinator_client or self
        vars(client).pop("_autoscaling_coordinator", None)
