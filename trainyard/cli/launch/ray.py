"""`trainyard launch ray`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.cli.launch.common import add_job_options, add_restarts, job_of, print_command
from trainyard.cli.options import positive
from trainyard.errors import InputError

if TYPE_CHECKING:
    from trainyard.launch.ray import RayOptions


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard launch ray` to its parser."""
    add_job_options(parser, each="node")
    parser.add_argument(
        "--address",
        metavar="auto|local|HOST:PORT",
        help="of Ray's head; local: one started on this machine for this run ($RAY_ADDRESS, or "
        "the one that runs here, or local)",
    )
    parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="nodes (1)")
    parser.add_argument("--cpus", type=positive, default=1, metavar="N", help="per rank (1)")
    parser.add_argument(
        "--min-nodes",
        type=positive,
        metavar="N",
        help="go on without nodes that are gone",
    )
    add_restarts(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--working-dir", metavar="DIR", help="copy it to all nodes (this one is on all nodes)"
    )
    where.add_argument(
        "--runtime-env", metavar="FILE", help="Ray's runtime environment, in YAML or JSON"
    )
    parser.set_defaults(run_command=launch)


def launch(options: argparse.Namespace) -> int:
    """Run `trainyard launch ray`; returns the exit code."""
    from trainyard.launch.ray import launch_ray

    job, ray = job_of(options, is_here=False), _options(options)
    if ray.folder is None and not job.run.is_absolute():  # Ray deletes its copy at the end
        raise InputError("launch.run-in-working-copy", path=job.run)
    if options.dry_run:
        ranks = ray.ranks or ray.gpus or "(one per GPU, or 1)"
        print_command(job.command, f"{ray.nodes} x a node of Ray: {ranks} x ")
        return 0
    return launch_ray(job, ray)


def _options(options: argparse.Namespace) -> "RayOptions":
    from trainyard.launch.ray import RayOptions

    return RayOptions(
        address=options.address,
        nodes=options.nodes,
        min_nodes=options.min_nodes,
        ranks=options.ranks,
        gpus=options.gpus,
        cpus=options.cpus,
        restarts=options.restarts,
        environment=_environment(options),
        is_json=options.json,
    )


def _environment(options: argparse.Namespace) -> dict[str, Any]:
    if options.working_dir is not None:
        return {"working_dir": options.working_dir}
    if options.runtime_env is None:
        return {}
    import yaml

    try:
        found = yaml.safe_load(Path(options.runtime_env).read_text())
    except OSError as error:
        raise InputError(
            "launch.runtime-env-unreadable", path=options.runtime_env, reason=error.strerror
        ) from None
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        raise InputError("launch.runtime-env-no-mapping", path=options.runtime_env)
    return found
