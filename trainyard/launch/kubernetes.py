"""Manifests for Kubeflow's operators, as documents and as YAML text.

Both operators start one pod per node, tell each pod its place, and act on the exit code of
`trainyard launch pod` (see pod.py): a preempted pod (143) comes back, without limit; a pod that
has used up its restarts ends the job.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.launch.job import Job
from trainyard.launch.pod import FAILED, PREEMPTED

GROUP_ID = 1000
"""Group of the user in the image; volumes are made writable for it."""
START_S = 1800
"""Seconds for all pods to arrive: a moved pod waits for a node, then fetches its image."""
_OWN_END_S = 30  # for the launcher in a pod to end, after its ranks
_RECIPES = "/etc/trainyard"
_TRAINER = "trainer.kubeflow.org"

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Pods:
    """Contents of each pod of a job."""

    image: str
    nodes: int
    gpus: int
    ranks: int
    cpu: str | None = None
    memory: str | None = None
    volumes: Mapping[str, str]
    """Mount path of each claim."""
    node_selector: Mapping[str, str]
    service_account: str | None = None
    grace_s: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A request to an operator."""

    name: str
    namespace: str | None
    job: Job
    recipe: str | None
    """Text of a recipe that does not come with Trainyard."""
    pods: Pods
    restarts: int


def documents(manifest: Manifest, kind: str) -> list[Document]:
    """The documents to apply to the cluster; `kind` is a key of KINDS."""
    recipe = [] if manifest.recipe is None else [_recipe_of(manifest, manifest.recipe)]
    return recipe + KINDS[kind](manifest)


def text_of(documents: list[Document]) -> str:
    """The documents as YAML, with multi-line texts as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
        pass

    def dump_text(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, dump_text)
    # Repeated parts are written out instead of referred to.
    Dumper.ignore_aliases = lambda self, data: True
    return "---\n".join(yaml.dump(part, Dumper=Dumper, sort_keys=False) for part in documents)


def recipe_path(name: str) -> str:
    """Path in the pods of a recipe that does not come with Trainyard."""
    return f"{_RECIPES}/{name}.toml"


def _trainer(manifest: Manifest) -> list[Document]:
    """A TrainJob with a runtime of its own. The cluster's runtimes cannot tell which exit codes are
    final, and count a moved pod as a failed one.
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
    """Rules by which a Job judges failed pods; a pod that matches none counts towards its limit."""
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [PREEMPTED]}},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(FAILED)}},
    ]


def _training_operator(manifest: Manifest) -> list[Document]:
    """A PyTorchJob. Exit codes from 128 on bring a pod back, other failures end the job."""
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
"""Documents by the kind of object."""


# --- common to both ---


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
    if pods.gpus:  # for NCCL: the 64 MB of a container are not enough
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    spec: Document = {"terminationGracePeriodSeconds": pods.grace_s + _OWN_END_S}
    if pods.service_account is not None:
        spec["serviceAccountName"] = pods.service_account
    if pods.node_selector:
        spec["nodeSelector"] = dict(pods.node_selector)
    # Avoids a visit to every file of a data set's volume at every start.
    spec["securityContext"] = {"fsGroup": GROUP_ID, "fsGroupChangePolicy": "OnRootMismatch"}
    return spec | {"containers": [container], "volumes": volumes}


def _resources(pods: Pods) -> Document:
    """Requests and limits. The CPU has no limit, since it would throttle the loader's threads."""
    limits = {"memory": pods.memory} if pods.memory else {}
    requests = limits | ({"cpu": pods.cpu} if pods.cpu else {})
    if pods.gpus:
        limits = limits | {"nvidia.com/gpu": str(pods.gpus)}
    resources = {"limits": limits, "requests": requests}
    return {name: amounts for name, amounts in resources.items() if amounts}
