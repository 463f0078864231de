"""Manifests for Kubeflow's operators, as documents and as YAML text.

Both operators start one pod per node, tell each pod its place, and act on the exit code of
`trainyard launch agent`: a preempted pod (143) comes back, without limit; a pod that has used up
its restarts ends the job.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.errors import DivergedError, InputError, TrainyardError
from trainyard.launch.job import Job

GROUP_ID = 1000
"""Group of the user in the image; volumes are made writable for it."""
START_S = 1800
"""Seconds for all pods to arrive: a moved pod waits for a node, then fetches its image."""
_FAILED = (TrainyardError.exit_code, InputError.exit_code, DivergedError.exit_code)
_OWN_END_S = 30  # for the launcher in a pod to end, after its ranks
_RECIPES = "/etc/trainyard"
_TRAINER = "trainer.kubeflow.org"

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A request to an operator."""

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


def documents(manifest: Manifest, kind: str) -> list[Document]:
    """The documents to apply to the cluster; `kind` is a key of KINDS."""
    found = KINDS[kind](manifest)
    if manifest.recipe is not None:
        data = {recipe_path(manifest.name).rpartition("/")[2]: manifest.recipe}
        found.insert(0, {**_document("v1", "ConfigMap", manifest), "data": data})
    return found


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
    replicated = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": manifest.restarts,
                "podFailurePolicy": {"rules": _RULES},
                "template": {
                    "spec": {"restartPolicy": "Never", **_pod(manifest, {"name": "node"})}
                },
            },
        },
    }
    runtime = {
        "mlPolicy": {"numNodes": manifest.nodes, "torch": {}},
        "template": {"spec": {"replicatedJobs": [replicated]}},
    }
    job = {
        "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": manifest.name},
        "trainer": _without_empty(
            image=manifest.image,
            command=_command(manifest),
            numNodes=manifest.nodes,
            numProcPerNode=manifest.ranks,
            resourcesPerNode=_resources(manifest),
        ),
    }
    return [
        {**_document(f"{_TRAINER}/v1alpha1", "TrainingRuntime", manifest), "spec": runtime},
        {**_document(f"{_TRAINER}/v1alpha1", "TrainJob", manifest), "spec": job},
    ]


# A Job judges failed pods by these; a pod that matches none counts towards its limit.
_RULES = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [128 + signal.SIGTERM]}},
    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(_FAILED)}},
]


def _training_operator(manifest: Manifest) -> list[Document]:
    """A PyTorchJob. Exit codes from 128 on bring a pod back, other failures end the job."""
    container = {"name": "pytorch", "image": manifest.image, "command": _command(manifest)}
    replica = {
        "restartPolicy": "ExitCode",
        "template": {"spec": _pod(manifest, container, resources=_resources(manifest))},
    }
    replicas = {"Master": {"replicas": 1, **replica}}
    if manifest.nodes > 1:
        replicas["Worker"] = {"replicas": manifest.nodes - 1, **replica}
    spec = {
        "runPolicy": {"cleanPodPolicy": "Running"},
        "nprocPerNode": str(manifest.ranks),
        "pytorchReplicaSpecs": replicas,
    }
    return [{**_document("kubeflow.org/v1", "PyTorchJob", manifest), "spec": spec}]


KINDS: Mapping[str, Callable[[Manifest], list[Document]]] = {
    "trainjob": _trainer,
    "pytorchjob": _training_operator,
}
"""Documents by the kind of object."""


# --- common to both ---


def _document(version: str, kind: str, manifest: Manifest) -> Document:
    metadata = _without_empty(name=manifest.name, namespace=manifest.namespace)
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _without_empty(**values: Any) -> Document:
    return {name: value for name, value in values.items() if value}


def _command(manifest: Manifest) -> list[str]:
    command, *arguments = manifest.job.arguments
    options = [f"--restarts={manifest.restarts}", f"--grace={manifest.grace_s}"]
    options += ["--doctor"] if command == "doctor" else []
    return ["trainyard", "launch", "agent", *arguments, *options]


def _pod(manifest: Manifest, container: Document, **more: Document) -> Document:
    """The specification of each pod. `more`: parts of the container after the volumes."""
    volumes: list[tuple[Document, str]] = [
        ({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}, path)
        for number, (claim, path) in enumerate(manifest.volumes.items())
    ]
    if manifest.recipe is not None:
        volumes.append(({"name": "recipe", "configMap": {"name": manifest.name}}, _RECIPES))
    if manifest.gpus:  # for NCCL: the 64 MB of a container are not enough
        volumes.append(({"name": "shm", "emptyDir": {"medium": "Memory"}}, "/dev/shm"))
    container = {
        **container,
        "env": [{"name": "TRAINYARD_START_S", "value": str(START_S)}],
        "volumeMounts": [{"name": volume["name"], "mountPath": path} for volume, path in volumes],
        **_without_empty(**more),
    }
    return {
        "terminationGracePeriodSeconds": manifest.grace_s + _OWN_END_S,
        **_without_empty(
            serviceAccountName=manifest.service_account,
            nodeSelector=dict(manifest.node_selector),
        ),
        # Avoids a visit to every file of a data set's volume at every start.
        "securityContext": {"fsGroup": GROUP_ID, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [container],
        "volumes": [volume for volume, _ in volumes],
    }


def _resources(manifest: Manifest) -> Document:
    """Requests and limits. The CPU has no limit, since it would throttle the loader's threads."""
    limits = _without_empty(memory=manifest.memory)
    requests = limits | _without_empty(cpu=manifest.cpu)
    if manifest.gpus:
        limits = limits | {"nvidia.com/gpu": str(manifest.gpus)}
    return _without_empty(limits=limits, requests=requests)
