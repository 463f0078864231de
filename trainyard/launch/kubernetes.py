"""A manifest for Kubeflow's Trainer, as text: a pod for each node runs `trainyard launch agent`.

The Trainer acts on the exit code of a pod: one that was told to end (143) comes back, without
limit; one that has used up its restarts ends the job.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from trainyard.launch.job import Job

GROUP_ID = 1000
"""Group of the user in the image; volumes are made writable for it."""
START_S = 1800
"""Seconds for all pods to arrive: a moved pod waits for a node, then fetches its image."""
_OWN_END_S = 30  # for the agent in a pod to end, after its ranks
_RECIPES = "/etc/trainyard"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A request to the Trainer."""

    name: str
    namespace: str | None
    job: Job
    recipe: str | None
    """Text of a recipe that does not come with Trainyard."""
    restarts: int
    image: str
    nodes: int
    """Number of pods. The following is for each pod."""
    gpus: int
    ranks: int
    cpu: str | None = None
    memory: str | None = None
    volumes: Mapping[str, str]
    """Mount path of each claim."""
    node_selector: Mapping[str, str]
    service_account: str | None = None
    grace_s: int


def recipe_path(name: str) -> str:
    """Path in the pods of a recipe that does not come with Trainyard."""
    return f"{_RECIPES}/{name}.toml"


def text_of(manifest: Manifest) -> str:
    """The manifest in YAML."""
    metadata = _quoted(_without_empty(name=manifest.name, namespace=manifest.namespace))
    volumes = _volumes(manifest)
    mounts = [{"name": volume["name"], "mountPath": path} for volume, path in volumes]
    text = _TEXT.format(
        metadata=metadata,
        name=_quoted(manifest.name),
        nodes=manifest.nodes,
        ranks=manifest.ranks,
        image=_quoted(manifest.image),
        command=_items(_command(manifest), column=4),
        resources=_quoted(_resources(manifest)),
        restarts=manifest.restarts,
        grace=manifest.grace_s + _OWN_END_S,
        account=_quoted(manifest.service_account or "default"),
        selector=_quoted(dict(manifest.node_selector)),
        group=GROUP_ID,
        start=START_S,
        mounts=_items(mounts, column=18),
        volumes=_items((volume for volume, _ in volumes), column=16),
    )
    if manifest.recipe is None:
        return text
    recipe = indent(manifest.recipe.rstrip("\n"), "    ")
    return _RECIPE.format(metadata=metadata, file=f"{manifest.name}.toml", text=recipe) + text


def _quoted(value: Any) -> str:
    """A value as JSON, which is YAML too: no text of a user's is taken for anything else."""
    return json.dumps(value, ensure_ascii=False)


def _items(values: Iterable[Any], column: int) -> str:
    return "\n".join(f"{' ' * column}- {_quoted(value)}" for value in values)


def _without_empty(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _command(manifest: Manifest) -> list[str]:
    command, *arguments = manifest.job.arguments
    options = [f"--restarts={manifest.restarts}", f"--grace={manifest.grace_s}"]
    options += ["--doctor"] if command == "doctor" else []
    return ["trainyard", "launch", "agent", *arguments, *options]


def _volumes(manifest: Manifest) -> list[tuple[dict[str, Any], str]]:
    """The volumes of a pod, each with its mount path."""
    volumes: list[tuple[dict[str, Any], str]] = [
        ({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}, path)
        for number, (claim, path) in enumerate(manifest.volumes.items())
    ]
    if manifest.recipe is not None:
        volumes.append(({"name": "recipe", "configMap": {"name": manifest.name}}, _RECIPES))
    if manifest.gpus:  # for NCCL: the 64 MB of a container are not enough
        volumes.append(({"name": "shm", "emptyDir": {"medium": "Memory"}}, "/dev/shm"))
    return volumes


def _resources(manifest: Manifest) -> dict[str, Any]:
    """Requests and limits. The CPU has no limit, since it would throttle the loader's threads."""
    limits = _without_empty(memory=manifest.memory)
    requests = limits | _without_empty(cpu=manifest.cpu)
    if manifest.gpus:
        limits = limits | {"nvidia.com/gpu": str(manifest.gpus)}
    return _without_empty(limits=limits, requests=requests)


_RECIPE = """\
apiVersion: v1
kind: ConfigMap
metadata: {metadata}
data:
  {file}: |
{text}
---
"""
_TEXT = """\
# A runtime of its own: those of the cluster cannot tell which exit codes are final, and count a
# moved pod as a failed one.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {metadata}
spec:
  mlPolicy:
    numNodes: {nodes}
    torch: {{}}
  template:
    spec:
      replicatedJobs:
      - name: node
        template:
          metadata:
            labels:
              trainer.kubeflow.org/trainjob-ancestor-step: trainer
          spec:
            backoffLimit: {restarts}
            podFailurePolicy:
              rules:  # a pod that matches none counts towards backoffLimit
              - action: Ignore
                onPodConditions:
                - {{type: DisruptionTarget, status: "True"}}
              - action: Ignore  # told to end; saved
                onExitCodes: {{operator: In, values: [143]}}
              - action: FailJob  # failed too often, or stopped by hand; a mistake; diverged
                onExitCodes: {{operator: In, values: [1, 2, 3]}}
            template:
              spec:
                restartPolicy: Never
                terminationGracePeriodSeconds: {grace}
                serviceAccountName: {account}
                nodeSelector: {selector}
                # OnRootMismatch avoids a visit to every file of a volume at every start.
                securityContext: {{fsGroup: {group}, fsGroupChangePolicy: OnRootMismatch}}
                containers:
                - name: node
                  env:
                  - {{name: TRAINYARD_START_S, value: "{start}"}}
                  volumeMounts:
{mounts}
                volumes:
{volumes}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {metadata}
spec:
  runtimeRef: {{apiGroup: trainer.kubeflow.org, kind: TrainingRuntime, name: {name}}}
  trainer:
    image: {image}
    command:
{command}
    numNodes: {nodes}
    numProcPerNode: {ranks}
    resourcesPerNode: {resources}
"""
