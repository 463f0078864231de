"""Pods on Kubernetes: what Kubeflow's operators take, as documents, and those as text.

Both operators start as many pods as there are nodes, tell each its place, and go by the exit code
of `trainyard launch pod` (see pod.py): a pod that was told to end comes back, without limit; one
that failed as often as it may ends the job.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.launch.job import Job
from trainyard.launch.pod import FAILED, PREEMPTED

GROUP_ID = 1000
"""Of the user in the image; volumes are made writable for it."""
START_S = 1800
"""For all pods to be there: one that has moved first waits for a node, then fetches its image."""
_OWN_END_S = 30  # for the launcher in a pod to end, after its ranks
_RECIPES = "/etc/trainyard"
_TRAINER = "trainer.kubeflow.org"

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Pods:
    """What each pod of a job gets."""

    image: str
    nodes: int
    gpus: int
    ranks: int
    cpu: str | None = None
    memory: str | None = None
    volumes: Mapping[str, str]
    """Where each claim is mounted."""
    node_selector: Mapping[str, str]
    service_account: str | None = None
    grace_s: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is asked of an operator."""

    name: str
    namespace: str | None
    job: Job
    recipe: str | None
    """The text of a recipe that does not come with Trainyard."""
    pods: Pods
    restarts: int


def documents(manifest: Manifest, kind: str) -> list[Document]:
    """What to give to the cluster, `kind` being one of KINDS."""
    recipe = [] if manifest.recipe is None else [_recipe_of(manifest, manifest.recipe)]
    return recipe + KINDS[kind](manifest)


def text_of(documents: list[Document]) -> str:
    """As YAML, with long texts as they are."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
        pass

    def dump_text(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, dump_text)
    # Each place where a part stands is to read like the others, not refer to them.
    Dumper.ignore_aliases = lambda self, data: True
    return "---\n".join(yaml.dump(part, Dumper=Dumper, sort_keys=False) for part in documents)


def recipe_path(name: str) -> str:
    """Where a recipe that does not come with Trainyard lies in the pods."""
    return f"{_RECIPES}/{name}.toml"


def _trainer(manifest: Manifest) -> list[Document]:
    """Of Trainer a runtime of the job's own: the cluster's cannot say which exit codes are final,
    and counts a pod that was moved as one that failed.
    """
    pods = manifest.pods
    container = {"name": "node", **_container(manifest)}
    pod = {"restartPolicy": "Never", **_pod(manifest, container)}
    replicated = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": manifest.restarts,
                "podFailurePolicy": {"rules": _rules()},
                "template": {"spec": pod},
            },
        },
    }
    runtime = {
        "mlPolicy": {"numNodes": pods.nodes, "torch": {}},
        "template": {"spec": {"replicatedJobs": [replicated]}},
    }
    trainer: Document = {
        "image": pods.image,
        "command": _command(manifest),
        "numNodes": pods.nodes,
        "numProcPerNode": pods.ranks,
    }
    if resources := _resources(pods):
        trainer["resourcesPerNode"] = resources
    ref = {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": manifest.name}
    job = {"runtimeRef": ref, "trainer": trainer}
    return [
        _document(f"{_TRAINER}/v1alpha1", "TrainingRuntime", manifest) | {"spec": runtime},
        _document(f"{_TRAINER}/v1alpha1", "TrainJob", manifest) | {"spec": job},
    ]


def _rules() -> list[Document]:
    """By which a Job judges pods that failed; those that no rule is about count up to its limit."""
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [PREEMPTED]}},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(FAILED)}},
    ]


def _training_operator(manifest: Manifest) -> list[Document]:
    """Of the Training Operator: exit codes from 128 on bring a pod back, others end the job."""
    pods = manifest.pods
    container: Document = {"name": "pytorch", "image": pods.image, "command": _command(manifest)}
    container |= _container(manifest)
    if resources := _resources(pods):
        container["resources"] = resources
    replica = {
        "restartPolicy": "ExitCode",
        "template": {"spec": _pod(manifest, container)},
    }
    replicas = {"Master": {"replicas": 1, **replica}}
    if pods.nodes > 1:
        replicas["Worker"] = {"replicas": pods.nodes - 1, **replica}
    spec = {
        "runPolicy": {"cleanPodPolicy": "Running"},
        "nprocPerNode": str(pods.ranks),
        "pytorchReplicaSpecs": replicas,
    }
    return [_document("kubeflow.org/v1", "PyTorchJob", manifest) | {"spec": spec}]


KINDS: Mapping[str, Callable[[Manifest], list[Document]]] = {
    "trainjob": _trainer,
    "pytorchjob": _training_operator,
}
"""By what kind of object a job is asked for."""


# --- what both have in common ---


def _document(version: str, kind: str, manifest: Manifest) -> Document:
    where = {} if manifest.namespace is None else {"namespace": manifest.namespace}
    metadata = {"name": manifest.name, **where}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _recipe_of(manifest: Manifest, text: str) -> Document:
    data = {recipe_path(manifest.name).rpartition("/")[2]: text}
    return _document("v1", "ConfigMap", manifest) | {"data": data}


def _command(manifest: Manifest) -> list[str]:
    command, *arguments = manifest.job.arguments
    options = [f"--restarts={manifest.restarts}", f"--grace={manifest.pods.grace_s}"]
    options += ["--doctor"] if command == "doctor" else []
    return ["trainyard", "launch", "pod", *arguments, *options]


def _container(manifest: Manifest) -> Document:
    mounts = [
        {"name": f"volume-{number}", "mountPath": path}
        for number, path in enumerate(manifest.pods.volumes.values())
    ]
    if manifest.recipe is not None:
        mounts.append({"name": "recipe", "mountPath": _RECIPES})
    if manifest.pods.gpus:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    env = [{"name": "TRAINYARD_START_S", "value": str(START_S)}]
    return {"env": env, "volumeMounts": mounts}


def _pod(manifest: Manifest, container: Document) -> Document:
    pods = manifest.pods
    volumes: list[Document] = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(pods.volumes)
    ]
    if manifest.recipe is not None:
        volumes.append({"name": "recipe", "configMap": {"name": manifest.name}})
    if pods.gpus:  # NCCL's, which the 64 MB of a container do not last
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    spec: Document = {"terminationGracePeriodSeconds": pods.grace_s + _OWN_END_S}
    if pods.service_account is not None:
        spec["serviceAccountName"] = pods.service_account
    if pods.node_selector:
        spec["nodeSelector"] = dict(pods.node_selector)
    # Of a data set's volume not every file is to be looked at in every start.
    spec["securityContext"] = {"fsGroup": GROUP_ID, "fsGroupChangePolicy": "OnRootMismatch"}
    return spec | {"containers": [container], "volumes": volumes}


def _resources(pods: Pods) -> Document:
    """Of the processor no limit, by which the loader's threads would be held up."""
    limits = {"memory": pods.memory} if pods.memory else {}
    requests = limits | ({"cpu": pods.cpu} if pods.cpu else {})
    if pods.gpus:
        limits = limits | {"nvidia.com/gpu": str(pods.gpus)}
    resources = {"limits": limits, "requests": requests}
    return {name: amounts for name, amounts in resources.items() if amounts}
