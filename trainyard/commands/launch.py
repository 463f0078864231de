"""`trainyard launch`: one recipe on several replicas."""

import argparse
import shlex
import sys

from trainyard.commands.train import add_training_options, config_of, run_folder


def add(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="launcher", required=True, metavar="LAUNCHER")
    local = subparsers.add_parser("local", help="several ranks on this machine")
    add_training_options(local)
    local.add_argument("--ranks", type=_positive, metavar="N", help="processes (one per GPU, or 1)")
    local.add_argument(
        "--restarts",
        type=_whole,
        default=0,
        metavar="N",
        help="how often all ranks are started again, and go on, after one has died (0)",
    )
    local.add_argument("--dry-run", action="store_true", help="print what would be started")
    local.set_defaults(run_command=launch_local)


def launch_local(options: argparse.Namespace) -> int:
    config_of(options)  # a mistake is told once, before anything starts
    arguments = ["train", options.recipe, "--run", str(run_folder(options))]
    arguments += [word for location in options.data or () for word in ("--data", location)]
    arguments += ["--json"] if options.json else []
    arguments += [f"--{key}={text}" for key, text in options.overrides.items()]
    if options.dry_run:
        ranks = options.ranks or "(one per GPU, or 1)"
        print(f"{ranks} x {shlex.join([sys.executable, '-m', 'trainyard', *arguments])}")
        return 0
    from trainyard.launch.local import launch_local as launch

    ranks = options.ranks or _num_devices()
    return launch(arguments, ranks=ranks, restarts=options.restarts, say=_say)


def _say(message: str) -> None:
    print(f"trainyard: {message}", file=sys.stderr)


def _num_devices() -> int:
    import torch

    return max(torch.cuda.device_count(), 1)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)
