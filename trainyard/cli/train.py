"""`trainyard train`, and options shared by all commands that train."""

import argparse
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.arguments import positive
from trainyard.cli.options import add_json, loading
from trainyard.data.storage.source import is_remote
from trainyard.distributed import discover
from trainyard.errors import InputError, RecipeError, TrainyardError
from trainyard.files import RunDirectory
from trainyard.launch.job import Job, job_of, shown
from trainyard.launch.launcher import num_gpus, ranks_here
from trainyard.launch.local import Local
from trainyard.parent import end_with_launcher, has_launcher
from trainyard.printable import print_line, printable
from trainyard.world import World

if TYPE_CHECKING:
    from trainyard.config import RunConfig

OUTPUT_MODES = {
    "quiet": "print only the result",
    "plain": "print log lines, as without a terminal",
    "all-ranks": "every rank prints log lines, with its number and host",
}
"""Options for the output of a run; they exclude each other."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard train` to its parser."""
    add_training_options(parser)
    text = "train on N GPUs of this machine, with a rank for each (1)"
    add = parser.add_argument_group("where to train").add_argument
    add("--gpus", type=positive, metavar="N", help=text)
    parser.set_defaults(run_command=train, ranks=None, restarts=0)  # of `launch local`


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `train` and the launchers share."""
    text = "a built-in name, a TOML file, or the directory of a run to go on with"
    parser.add_argument("recipe", metavar="RECIPE", help=text)
    add = parser.add_argument_group("what to read and to write").add_argument
    add(
        "--data",
        metavar="LOCATION",
        action="append",
        help="a data set with train and val data; can be repeated to merge several, of which only "
        "one needs val data",
    )
    add("--run", metavar="DIR", help="run directory (runs/NAME of the recipe)")
    printed = parser.add_argument_group("what to print")
    add_json(printed)
    modes = printed.add_mutually_exclusive_group()
    for name, help_text in OUTPUT_MODES.items():
        modes.add_argument(f"--{name}", action="store_true", help=help_text)
    parser.epilog = (
        "Any recipe key can be given as --SECTION.KEY VALUE, for example --optim.lr 0.1; "
        "`trainyard recipes --keys WORD` finds them."
    )
    parser.set_defaults(takes_overrides=True)


def train(options: argparse.Namespace) -> int:
    """Run `trainyard train`. Returns the exit code."""
    end_with_launcher()
    take_run(options)
    config, folder = config_of(options), run_folder(options)
    world = discover()
    from trainyard.data.open_datasets import check_sources

    check_sources(config.data, world)
    is_named = Path(options.recipe) == RunDirectory(folder).recipe
    _check_before_torch(config, RunDirectory(folder, is_named=is_named))
    if options.gpus is not None and _num_ranks(options, world) > 1:
        return Local().run(_job(options, folder), options)
    with loading():
        from trainyard.data.index.layout import location_remarks
        from trainyard.data.open_datasets import warn
        from trainyard.monitor.terminal import console_of
        from trainyard.run import trainer as run

    console = console_of(
        world,
        is_quiet=options.quiet or options.json,
        is_plain=options.plain,
        all_ranks=options.all_ranks,
    )
    if world.is_first:
        warn(
            console,
            (text for data in options.data or () for text in location_remarks(data)),
        )
        warn(console, _idle_gpus(options, folder, world))
    outcome = run.train(config, folder, world=world, console=console, is_named=is_named)
    if world.is_first:
        print(json.dumps(outcome.as_dict()) if options.json else outcome.sentence())
        if outcome.stopped is None:
            report_run(folder, is_printed=not options.json)
    return outcome.stopped.exit_code if outcome.stopped else 0


def _check_before_torch(config: "RunConfig", folder: RunDirectory) -> None:
    """CheckpointError for a run of another recipe in the folder, or weights that are not there."""
    from trainyard.compare import check_same_recipe
    from trainyard.model.catalogue import check_weights
    from trainyard.model.config import PIXELS

    if (folder.checkpoints / "latest").exists():
        check_same_recipe(folder, config, [f"data.{key}" for key in PIXELS])
    elif config.model.checkpoint == "timm" and config.run.resume in ("auto", "never"):
        check_weights(config.model.name)


def _num_ranks(options: argparse.Namespace, world: World) -> int:
    """The ranks for --gpus. InputError in a rank of a launcher, or beside fewer GPUs."""
    if world.size > 1 or has_launcher():
        raise InputError(
            "launch.gpus-of-a-rank",
            "--gpus {num_gpus}: this process is a rank, and its launcher sets the number of ranks: "
            "leave --gpus out",
            num_gpus=options.gpus,
        )
    with loading():
        return ranks_here(options)


def _job(options: argparse.Namespace, folder: Path) -> Job:
    return job_of(options, folder, ("json", *OUTPUT_MODES))


def _idle_gpus(options: argparse.Namespace, folder: Path, world: World) -> Iterator[str]:
    """A remark with the line that uses all GPUs, if nothing has set the number of ranks."""
    count = num_gpus()
    if count > 1 and world.size == 1 and not (options.gpus or has_launcher()):
        line = shown(("trainyard", *_job(options, folder).arguments, "--gpus", str(count)))
        yield f"{count} GPUs are visible, and this run uses one; all of them: {line}"


def report_run(folder: Path, *, is_printed: bool) -> None:
    """Write the report. Whatever prevents it is printed: the run itself is complete."""
    try:
        from trainyard.report.page import write_report

        path = write_report([folder])
    except Exception as error:
        why = str(error) if isinstance(error, TrainyardError | OSError) else repr(error)
        again = f"`trainyard report {shlex.quote(str(folder))}` writes it"
        print_line(f"the run is complete, no report ({why}): {again}")
    else:
        if is_printed:
            print(printable(f"its report: {path}"))


def take_run(options: argparse.Namespace) -> None:
    """Take a run in place of a recipe, unless --run names another: its recipe, in its directory."""
    from trainyard.config import builtin_recipes

    run, recipe = options.recipe, RunDirectory(Path(options.recipe)).recipe
    is_own = Path(options.run or run) == Path(run)
    if is_own and recipe.is_file() and run not in builtin_recipes():
        options.run, options.recipe = run, str(recipe)


def config_of(options: argparse.Namespace) -> "RunConfig":
    """The recipe with the overrides of the command line."""
    from trainyard.config import load_recipe, on_data
    from trainyard.model.catalogue import check_name

    check_recipe(options)
    config = load_recipe(options.recipe, options.overrides)
    check_name(config.model.name)
    return config if options.data is None else on_data(config, options.data, options.overrides)


def check_recipe(options: argparse.Namespace) -> None:
    """RecipeError if a data set or a run is given instead of a recipe."""
    from trainyard.config import builtin_recipes

    recipe, command = options.recipe, options.parser.prog
    if recipe in builtin_recipes():
        return
    recipe_of_run = RunDirectory(Path(recipe)).recipe
    if recipe_of_run.is_file():
        raise RecipeError(
            "recipe.is-run",
            "{path}: is a run, not a recipe: trainyard train {path}, without --run, goes on with "
            "it; {recipe} is its recipe, for a new one",
            path=shlex.quote(recipe),
            recipe=recipe_of_run,
        )
    if os.path.isdir(recipe) or is_remote(recipe):
        named = [name for name in options.data or () if name in builtin_recipes()]
        command = f"{command} {[*named, 'RECIPE'][0]} --data {shlex.quote(recipe)}"
        raise RecipeError(
            "recipe.is-data",
            "{location}: is data, not a recipe; did you mean {command}?",
            location=recipe,
            command=command,
        )


def run_folder(options: argparse.Namespace) -> Path:
    """The run directory that the options name, or the default one."""
    return Path(options.run or Path("runs") / Path(options.recipe).stem)
