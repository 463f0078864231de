"""A manifest for Kubeflow's Trainer, as text: a pod for each node runs `trainyard launch agent`.

The Trainer acts on the exit code of a pod: one that was told to end (143) comes back, without
limit; one that has used up its restarts ends the job.
"""

import argparse
import json
import re
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from textwrap import indent
from typing import Any

from trainyard.arguments import positive, whole_number
from trainyard.data.storage.source import is_remote
from trainyard.errors import InputError
from trainyard.files import RunDirectory
from trainyard.launch.job import Job
from trainyard.launch.launcher import Launcher, add_grace, add_ranks, add_restarts

GROUP_ID = 1000
"""Group of the user in the image; volumes are made writable for it."""
START_S = 1800
"""Seconds for all pods to arrive: a moved pod waits for a node, then fetches its image."""
_OWN_END_S = 30  # for the agent in a pod to end, after its ranks
_RECIPES = "/etc/trainyard"
_RESTARTS = 3  # a lost node uses one up


class Kubernetes(Launcher):
    summary = "pods, by Kubeflow's Trainer"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        where = parser.add_argument_group("where to train")
        add_ranks(where, "each pod", gpus=whole_number)
        add_restarts(where, default=_RESTARTS)
        add_grace(where)
        add = where.add_argument
        add("--nodes", type=positive, default=1, metavar="N", help="pods (1 if not given)")
        add("--namespace", metavar="NAME", help="(kubectl's if not given)")
        add("--name", metavar="NAME", help="of the job (the run directory's)")
        add("--apply", action="store_true", help="give it to kubectl, instead of printing it")
        add = parser.add_argument_group("what the pods have").add_argument
        add("--image", required=True, help="of a container that has trainyard (see Dockerfile)")
        add("--cpus", type=positive, metavar="N", help="cores that a pod asks for, for each rank")
        add("--mem", metavar="N", help="memory of each pod: 64Gi")
        add(
            "--volume",
            type=_volume,
            action="append",
            default=[],
            metavar="CLAIM:/PATH",
            help="a persistent volume claim and where it is mounted; can be given again. The run "
            "directory is to be on one, which all pods can write to",
        )
        add(
            "--node-selector",
            type=_selector,
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="a label of the nodes to use; can be given again",
        )
        add("--service-account", metavar="NAME", help="that the pods act as")

    def plan(self, job: Job, options: argparse.Namespace) -> str:
        _check_paths(job, options)
        name = options.name or re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
        recipe = _own_recipe(options.recipe, job.run)
        if recipe is not None:
            command, _, *arguments = job.arguments
            job = replace(job, arguments=(command, f"{_RECIPES}/{name}.toml", *arguments))
        job.check_writable("the manifest")
        agent = job.of_agent(restarts=options.restarts, grace=options.grace)
        metadata = _quoted(_without_empty(name=name, namespace=options.namespace))
        volumes = _volumes(options, None if recipe is None else name)
        mounts = [{"name": volume["name"], "mountPath": path} for volume, path in volumes]
        text = _TEXT.format(
            metadata=metadata,
            name=_quoted(name),
            nodes=options.nodes,
            ranks=_ranks(options),
            image=_quoted(options.image),
            command=_items(["trainyard", *agent.arguments], column=4),
            resources=_quoted(_resources(options)),
            restarts=options.restarts,
            grace=options.grace + _OWN_END_S,
            account=_quoted(options.service_account or "default"),
            selector=_quoted(dict(options.node_selector)),
            group=GROUP_ID,
            start=START_S,
            mounts=_items(mounts, column=18),
            volumes=_items((volume for volume, _ in volumes), column=16),
        )
        if recipe is None:
            return text
        return _RECIPE.format(metadata=metadata, file=f"{name}.toml", text=recipe) + text

    def run(self, job: Job, options: argparse.Namespace) -> int:
        text = self.plan(job, options)
        if not options.apply:
            print(text, end="")
            return 0
        try:
            return subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True).returncode
        except FileNotFoundError:
            raise InputError(
                "launch.no-kubectl",
                "kubectl is not installed: install it, or drop --apply and apply the manifest "
                "yourself",
            ) from None


def _check_paths(job: Job, options: argparse.Namespace) -> None:
    """InputError for a run directory or data that pods would not find."""
    volumes = dict(options.volume)
    if len(volumes) < len(options.volume):
        raise InputError("launch.claim-twice", "--volume: a claim appears twice; mount it once")
    if not any(PurePosixPath(job.run).is_relative_to(path) for path in volumes.values()):
        raise InputError(
            "launch.run-not-on-volume",
            "the run directory {path} is not on a volume, so a restarted pod would not find it: "
            "--volume CLAIM:/PATH --run /PATH/runs/NAME",
            path=job.run,
        )
    for location in options.data or ():
        if not is_remote(location) and not PurePosixPath(location).is_absolute():
            raise InputError(
                "launch.data-not-on-pod",
                "--data {location}: a path of this folder, which a pod does not have: name the "
                "path on a volume, --volume CLAIM:/PATH --data /PATH/NAME, or a URL",
                location=location,
            )


def _own_recipe(recipe: str, run: Path) -> str | None:
    """The lines of a recipe; None for one that comes with Trainyard, or is in the run directory."""
    from trainyard.config import builtin_recipes, keys_set, load_recipe, tree_as_toml

    if recipe in builtin_recipes() or Path(recipe) == RunDirectory(run).recipe:
        return None
    return indent(tree_as_toml(keys_set(load_recipe(recipe))).rstrip("\n"), "    ")


def _volume(text: str) -> tuple[str, str]:
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not CLAIM:/PATH")
    return claim, str(PurePosixPath(path))


def _selector(text: str) -> tuple[str, str]:
    key, is_pair, value = text.partition("=")
    if not key or not is_pair:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, a label of a node")
    return key, value


def _quoted(value: Any) -> str:
    """A value as JSON, which is YAML too: no text of a user's is taken for anything else."""
    return json.dumps(value, ensure_ascii=False)


def _items(values: Iterable[Any], column: int) -> str:
    return "\n".join(f"{' ' * column}- {_quoted(value)}" for value in values)


def _without_empty(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _volumes(options: argparse.Namespace, recipe: str | None) -> list[tuple[dict[str, Any], str]]:
    """The volumes of a pod, each with its mount path. `recipe`: the name of its config map."""
    volumes: list[tuple[dict[str, Any], str]] = [
        ({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}, path)
        for number, (claim, path) in enumerate(options.volume)
    ]
    if recipe:
        volumes.append(({"name": "recipe", "configMap": {"name": recipe}}, _RECIPES))
    if options.gpus:  # for NCCL: the 64 MB of a container are not enough
        volumes.append(({"name": "shm", "emptyDir": {"medium": "Memory"}}, "/dev/shm"))
    return volumes


def _ranks(options: argparse.Namespace) -> int:
    """The number of ranks of a pod."""
    return int(options.ranks or options.gpus or 1)


def _resources(options: argparse.Namespace) -> dict[str, Any]:
    """Requests and limits. The CPU has no limit, since it would throttle the loader's threads."""
    limits = _without_empty(memory=options.mem)
    cores = str(options.cpus * _ranks(options)) if options.cpus else ""
    requests = limits | _without_empty(cpu=cores)
    if options.gpus:
        limits = limits | {"nvidia.com/gpu": str(options.gpus)}
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
