"""Functions of the user that a recipe names, as "module:function".

A run directory may come from somebody else, and its recipe gives a function's arguments too. Only
modules of the working directory are therefore imported, never those of an installed package, such
as `torch.hub:load`, or of a run directory.
"""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from trainyard.errors import RecipeError, TrainyardError
from trainyard.files import RunDirectory
from trainyard.hints import did_you_mean
from trainyard.printable import print_line


def is_own(name: str) -> bool:
    """True for "module:function", which no name of timm is."""
    return ":" in name


@cache
def announce(key: str, name: str) -> None:
    """Print, once, the file that a recipe's `key` imports. RecipeError as for `imported`."""
    print_line(f"{key} = {name!r} imports {find(key, name)}")


def imported(key: str, name: str) -> Callable[..., Any]:
    """The function that a recipe's `key` names, from the working directory.

    RecipeError if there is no such module or function, or if the import fails.
    """
    file, (module, _, function) = find(key, name), name.partition(":")
    with as_recipe_error(key, name):
        loaded = importlib.import_module(module)
    if not hasattr(loaded, function):
        functions = [each for each, value in vars(loaded).items() if callable(value)]
        raise RecipeError(
            "function.not-found",
            "{key}: {path} has no {name!r}{hint}",
            key=key,
            path=file,
            name=function,
            hint=did_you_mean(function, functions),
        )
    called: Callable[..., Any] = getattr(loaded, function)
    if not callable(called):
        raise RecipeError(
            "function.not-callable",
            "{key}: {name!r} in {path} is of type {type}, not a function",
            key=key,
            name=function,
            path=file,
            type=type(called).__name__,
        )
    return called


def find(key: str, name: str) -> Path:
    """The file of the module that a recipe's `key` names; runs no code of it.

    The working directory joins the end of sys.path, so that the module can import others there.
    RecipeError if the working directory lacks the module, or another one hides it.
    """
    module, _, function = name.partition(":")
    parts = module.split(".")
    if not all(part.isidentifier() for part in (*parts, function)):
        raise RecipeError(
            "function.malformed-name",
            "{key} = {value!r}: write it as 'module:function', 'nets:small' say",
            key=key,
            value=name,
        )
    directory = Path.cwd()
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
    file = _file_of(directory, parts)
    if file is None:
        raise RecipeError(
            "function.module-not-found",
            "{key} = {value!r}: there is no {module}.py in the working directory {path}, and only "
            "its modules are imported: change to its folder; to use an installed package, import "
            "the function in a module here",
            key=key,
            value=name,
            module=module.replace(".", "/"),
            path=directory,
        )
    for folder in (file.parent, *file.parent.parents):
        if RunDirectory(folder).recipe.is_file() and RunDirectory(folder).checkpoints.is_dir():
            raise RecipeError(
                "function.in-run-directory",
                "{key} = {value!r}: {path} is in a run directory, whose code is never imported: "
                "read it, and copy it into a folder of your own if you trust it",
                key=key,
                value=name,
                path=file,
            )
    _check_top(key, directory, parts[0])
    return file


def _file_of(folder: Path, parts: list[str]) -> Path | None:
    path = folder.joinpath(*parts)
    files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _check_top(key: str, directory: Path, top: str) -> None:
    """RecipeError unless Python would import the module `top` from the folder `directory`."""
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # the program itself, or a module without a file
        spec = None
    wanted = _file_of(directory, [top]) or directory / top
    paths = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    # A folder without __init__.py has no origin, and may be spread over several places.
    paths = paths[:1] if paths[:1] != [""] else paths[1:]
    if not paths or not all(os.path.exists(p) and os.path.samefile(p, wanted) for p in paths):
        other = next((path for path in paths if Path(path) != wanted), "another module")
        raise RecipeError(
            "function.module-hidden",
            "{key}: {path} is hidden by {other}: give it another name",
            key=key,
            path=wanted,
            other=other,
        )


@contextmanager
def as_recipe_error(key: str, name: str) -> Iterator[None]:
    """Inside, a function of the user runs: its errors become a RecipeError with their place."""
    try:
        yield
    except TrainyardError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        what = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        raise RecipeError(
            "function.failed",
            "{key} = {value!r} failed: {reason}{place}",
            key=key,
            value=name,
            reason=what,
            place=_origin(error),
        ) from error


def _origin(error: Exception) -> str:
    """The line of a module in the working directory that raised an error; "" if none did."""
    package, directory = Path(__file__).parent, Path.cwd()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_ours = path.is_relative_to(package) or "site-packages" in path.parts
        if path.is_relative_to(directory) and not is_ours:
            return f" ({path.relative_to(directory)}, line {frame.lineno})"
    return ""
