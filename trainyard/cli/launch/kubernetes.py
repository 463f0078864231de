"""`trainyard launch kubernetes`."""

import argparse
import re
import subprocess
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from trainyard.cli.launch.agent import add_grace
from trainyard.cli.launch.common import (
    add_job_options,
    add_restarts,
    check_writable,
    job_of,
)
from trainyard.cli.options import positive, whole
from trainyard.cli.train import run_folder
from trainyard.data.storage.source import is_remote
from trainyard.errors import InputError

if TYPE_CHECKING:
    from trainyard.launch.kubernetes import Manifest

_RESTARTS = 3  # a lost node uses one up


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard launch kubernetes` to its parser."""
    add_job_options(parser, ranks="processes per pod (one per GPU, or 1)")
    add_restarts(parser, default=_RESTARTS)
    add_grace(parser)
    add = parser.add_argument
    add("--image", required=True, help="of a container that has trainyard (see Dockerfile)")
    add("--nodes", type=positive, default=1, metavar="N", help="pods (1 if not given)")
    add("--gpus", type=whole, default=0, metavar="N", help="GPUs of each pod, with a rank for each")
    add("--cpu", metavar="N", help="cores that each pod asks for: 16, 500m")
    add("--memory", metavar="N", help="of each pod: 64Gi")
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
    add("--namespace", metavar="NAME", help="(kubectl's if not given)")
    add("--service-account", metavar="NAME", help="that the pods act as")
    add("--name", metavar="NAME", help="of the job (the run directory's)")
    add("--apply", action="store_true", help="give it to kubectl, instead of printing it")
    parser.set_defaults(run_command=launch)


def launch(options: argparse.Namespace) -> int:
    """Run `trainyard launch kubernetes`; returns the exit code."""
    from trainyard.launch.kubernetes import text_of

    text = text_of(_manifest(options))
    if options.apply and not options.dry_run:
        return _apply(text)
    print(text, end="")
    return 0


def _apply(text: str) -> int:
    try:
        return subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True).returncode
    except FileNotFoundError:
        raise InputError("launch.no-kubectl") from None


def _manifest(options: argparse.Namespace) -> "Manifest":
    from trainyard.config import builtin_recipes, keys_set, load_recipe, tree_as_toml
    from trainyard.launch.kubernetes import Manifest, recipe_path

    volumes = dict(options.volume)
    if len(volumes) < len(options.volume):
        raise InputError("launch.claim-twice")
    run = run_folder(options)
    if not any(PurePosixPath(run).is_relative_to(path) for path in volumes.values()):
        raise InputError("launch.run-not-on-volume", path=run)
    for location in options.data or ():
        if not is_remote(location) and not PurePosixPath(location).is_absolute():
            raise InputError("launch.data-not-on-pod", location=location)
    name = options.name or re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")
    is_own = options.recipe not in builtin_recipes()
    job = job_of(options, is_here=False, recipe_there=recipe_path(name) if is_own else None)
    check_writable(job, "the manifest")
    return Manifest(
        name=name,
        namespace=options.namespace,
        job=job,
        recipe=tree_as_toml(keys_set(load_recipe(options.recipe))) if is_own else None,
        restarts=options.restarts,
        image=options.image,
        nodes=options.nodes,
        gpus=options.gpus,
        ranks=options.ranks or options.gpus or 1,
        cpu=options.cpu,
        memory=options.memory,
        volumes=volumes,
        node_selector=dict(options.node_selector),
        service_account=options.service_account,
        grace_s=options.grace,
    )


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
