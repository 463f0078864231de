"""`launch kubernetes`: its manifests, and what its pods do, with the operators' environments."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob

from tests.command_line import Capture, run, shown
from tests.errors import check as check_error
from tests.errors import raises, refused
from tests.test_cli_signals import Started, has_begun, under_way, wait_for
from tests.web import free_port
from trainyard.config import keys_set, load_recipe
from trainyard.launch.elastic import in_pod

GOLDEN = Path(__file__).parent.parent / "golden"
KUBERNETES = "1.37"  # the newest version whose schemas are there
LAUNCH = ("launch", "kubernetes", "debug", "--image", "registry.example/trainyard:1")
ON_VOLUME = (*LAUNCH, "--volume", "runs:/runs", "--run", "/runs/first")
MANIFESTS = {
    "kubernetes-trainjob.yaml": (
        *(*LAUNCH, "--nodes", "2", "--gpus", "8", "--cpus", "12", "--mem", "800Gi"),
        *("--volume", "runs:/runs", "--run", "/runs/Night_1", "--volume", "imagenet:/data"),
        *("--data", "/data/imagenet", "--namespace", "vision", "--restarts", "5"),
        *("--grace", "120", "--node-selector", "example.com/gpu=h200", "--optim.lr", "0.1"),
    ),
    "kubernetes-trainjob-one.yaml": (*ON_VOLUME, "--ranks", "2", "--service-account", "trainer"),
}

Document = dict[str, Any]


# --- manifests ---


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_as_they_were(name: str, capsys: Capture) -> None:
    assert shown(capsys, *MANIFESTS[name]) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_follow_the_schemas(name: str, capsys: Capture) -> None:
    for document in yaml.safe_load_all(shown(capsys, *MANIFESTS[name])):
        check(document)


def check(document: Document) -> None:
    """Against the schemas of Kubernetes and of Kubeflow, where there are any."""
    kind, spec = document["kind"], document.get("spec", {})
    if kind == "TrainJob":
        assert TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document
    elif kind == "TrainingRuntime":
        assert TrainerV1alpha1TrainingRuntime.from_dict(document).to_dict() == document
        (replicated,) = spec["template"]["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        assert replicated["name"] == container["name"] == "node"
        container["image"] = "the TrainJob's"
        check_core("batch/v1", "Job", {"spec": job})
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def check_core(version: str, kind: str, content: Document) -> None:
    document = {"apiVersion": version, "kind": kind, "metadata": {"name": "x"}, **content}
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_a_doctor_goes_to_the_pods(capsys: Capture) -> None:
    *_, job = yaml.safe_load_all(shown(capsys, *ON_VOLUME, "--doctor"))
    command = job["spec"]["trainer"]["command"]
    assert command[:4] == ["trainyard", "launch", "agent", "debug"]
    assert command[-3:] == ["--restarts=0", "--grace=300", "--doctor"]


def test_a_recipe_of_ones_own_goes_along(tmp_path: Path, capsys: Capture) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "debug"\n[optim]\nlr = 0.25\n')
    words = [str(recipe) if word == "debug" else word for word in ON_VOLUME]
    config_map, runtime, job = yaml.safe_load_all(shown(capsys, *words))
    check(config_map)
    (file, text), *_ = config_map["data"].items()
    (tmp_path / file).write_text(text)
    there, here = load_recipe(str(tmp_path / file)), load_recipe(str(recipe))
    assert there == here
    assert keys_set(there) == keys_set(here)  # the weights there still bring what it leaves open
    command = job["spec"]["trainer"]["command"]
    assert command[3:6] == [f"/etc/trainyard/{file}", "--run", "/runs/first"]
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert {"name": "recipe", "configMap": {"name": "first"}} in pod["spec"]["volumes"]


@pytest.mark.parametrize(
    ("words", "code", "fields"),
    [
        (["--run", "runs/first"], "launch.run-not-on-volume", {"path": "runs/first"}),
        (["--run", "/runs-of-others/first"], "launch.run-not-on-volume", {}),
        (["--data", "photos"], "launch.data-not-on-pod", {"location": "photos"}),
        (["--volume", "runs:/other"], "launch.claim-twice", {}),
        (["--volume", "runs"], "option.invalid", {"option": "--volume"}),
        (["--node-selector", "gpu"], "option.invalid", {"option": "--node-selector"}),
        (["--optim.rate", "1"], "recipe.unknown-key", {"key": "optim.rate"}),
    ],
)
def test_wrong_words_are_named(words: list[str], code: str, fields: dict[str, str]) -> None:
    check_error(refused(*ON_VOLUME, *words), code, **fields)


def test_kubectl_is_given_the_text(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check_error(refused(*ON_VOLUME, "--apply"), "launch.no-kubectl")
    kubectl = tmp_path / "kubectl"
    lines = [f'echo "$@" >"{tmp_path}/words"', f'/bin/cat >"{tmp_path}/text"', "exit 7"]
    kubectl.write_text("\n".join(["#!/bin/sh", *lines]))
    kubectl.chmod(0o755)
    assert run(*ON_VOLUME, "--apply") == 7
    assert (tmp_path / "words").read_text() == "apply -f -\n"
    assert (tmp_path / "text").read_text() == shown(capsys, *ON_VOLUME, "--apply", "--dry-run")


# --- pods ---


def operator_env(job: Document, node: int, port: int) -> dict[str, str]:
    """The variables that Trainer 2.3 sets in a pod."""
    trainer = job["spec"]["trainer"]
    place = {
        "PET_NNODES": trainer["numNodes"],
        "PET_NPROC_PER_NODE": trainer["numProcPerNode"],
        "PET_NODE_RANK": node,
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
    }
    return {name: str(value) for name, value in place.items()}


def rendered(capsys: Capture, folder: Path, *words: object) -> Document:
    """The job that is asked for, last of the documents."""
    volume = ("--volume", f"runs:{folder.parent}", "--run", folder)
    text = shown(capsys, *LAUNCH, *volume, *words)
    job: Document = list(yaml.safe_load_all(text))[-1]
    return job


def pod(tmp_path: Path, job: Document, node: int, port: int) -> AbstractContextManager[Started]:
    """A pod's process; nothing of it is left when a test fails either."""
    command = [sys.executable, "-m", *job["spec"]["trainer"]["command"]]
    return under_way(f"{tmp_path}-{node}", command, operator_env(job, node, port))


def ended(started: Started) -> tuple[int, str]:
    """The exit code and stderr of a pod that leaves no process behind."""
    _, err = started.process.communicate(timeout=150)
    assert started.members() == []
    return started.process.returncode, err


def reports(folder: Path, *keys: str) -> list[list[Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[line[key] for key in keys] for line in lines if line["kind"] in ("train", "val")]


@pytest.fixture
def two_cores() -> Iterator[None]:
    """One for each rank of a pod, and of four: as many threads, so that sums are the same bits."""
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_cores)[:2])
    yield
    os.sched_setaffinity(0, all_cores)


@pytest.mark.night
@pytest.mark.usefixtures("two_cores")
def test_a_pod_that_was_moved_goes_on(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["--data", digits, "--data.threads", "1", "--run.log_every", "1 step"]
    words += ["--run.length", "60 steps", "--run.save_every", "0 steps", "--run.eval_every"]
    words += ["0 steps", "--batch.size", "32"]
    local, folder, port = tmp_path / "local", tmp_path / "run", free_port()
    job = rendered(capsys, folder, "--nodes", 2, "--ranks", 2, *words)
    with ExitStack() as pods:
        first, second = (pods.enter_context(pod(tmp_path, job, node, port)) for node in range(2))
        wait_for(lambda: has_begun(folder), "the first report", timeout_s=150)
        second.process.terminate()
        code, err = ended(second)
        assert (code, err) == (143, "")  # of which the Trainer starts the pod again
        again = pods.enter_context(pod(tmp_path, job, 1, port))
        assert ended(again) == (0, "")
        code, err = ended(first)
    assert code == 0
    assert (
        err == "trainyard: another host was told to end; starting again, to go on when it is back\n"
    )
    launch = [sys.executable, "-m", "trainyard", "launch", "local", "debug", "--ranks", "4"]
    launch += ["--run", str(local), *map(str, words)]
    subprocess.run(launch, check=True, capture_output=True, timeout=200)
    losses = reports(folder, "kind", "step", "loss")
    assert losses == reports(local, "kind", "step", "loss")
    assert [step for kind, step, _ in losses if kind == "train"] == [*range(1, 61)]


def test_a_mistake_ends_the_job(tmp_path: Path, capsys: Capture) -> None:
    words = ("--data", tmp_path / "nowhere")
    job = rendered(capsys, tmp_path / "run", "--ranks", 2, *words)
    with pod(tmp_path, job, 0, free_port()) as started:
        code, err = ended(started)
    assert code == 2
    assert err.count("\n") == 1 and "nowhere" in err


def test_the_place_of_a_pod_is_that_of_its_environment() -> None:
    given = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1"}
    given |= {"PET_MASTER_ADDR": "run-node-0-0.run", "PET_MASTER_PORT": "29500"}
    env = given | {"HOME": "/"}
    ranks, meeting = in_pod(env)
    found = meeting.next_rendezvous()
    assert (ranks, found.rank, found.world_size, "PET_NNODES" in env) == (8, 1, 2, False)
    point = found.bootstrap_store_info
    assert point and (point.master_addr, point.master_port) == ("run-node-0-0.run", 29500)
    with raises("variable.not-a-number", name="PET_NPROC_PER_NODE", value="auto"):
        in_pod(given | {"PET_NPROC_PER_NODE": "auto"})
    with raises("launch.agent-outside-pod", name="PET_NNODES"):
        in_pod({"PET_NODE_RANK": "1"})
