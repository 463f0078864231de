"""Errors are raised by a code and a text, with the fields of the text."""

import ast
import copy
import json
import pickle
import re
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainyard
from tests.command_line import run
from trainyard import command_line, errors
from trainyard.errors import (
    SHARED,
    DataError,
    DiskError,
    InputError,
    Requeued,
    Stopped,
    TrainyardError,
)
from trainyard.world import World

ROOT = Path(trainyard.__file__).parent
Capture = pytest.CaptureFixture[str]
BY_ITSELF = {"DiskError"}  # has its code and fields from an OSError


def kinds() -> set[str]:
    """Names of the classes of errors, in all modules."""
    found = {name for name, each in vars(errors).items() if _is_error(each)}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and found & {
                ast.unparse(base) for base in node.bases
            }:
                found.add(node.name)
    return found - BY_ITSELF


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, TrainyardError)


def sites() -> Iterator[tuple[str, ast.Call, set[str]]]:
    """Every call that makes an error, with its place, and the fields that it gives."""
    names = kinds()
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        shared = {name: set[str]() for name in names} | _partials(tree, names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                made = shared.keys() & set(_made_by(node.func))
                fields = {keyword.arg or "**" for keyword in node.keywords}
                for name in sorted(made)[:1]:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node, fields | shared[name]


def _partials(tree: ast.AST, names: set[str]) -> dict[str, set[str]]:
    """The fields of `partial(ERROR, FIELD=…)`, by the names that it has or is returned by."""
    found = dict[str, set[str]]()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                pass
            case ast.FunctionDef(name=name, body=[*_, ast.Return(value=ast.Call() as call)]):
                pass
            case _:
                continue
        if ast.unparse(call.func) == "partial" and ast.unparse(call.args[0]) in names:
            fields = {keyword.arg or "**" for keyword in call.keywords}
            assert found.setdefault(name, fields) == fields, f"two kinds of {name}"
    return found


def _made_by(called: ast.expr) -> Iterator[str]:
    """Names of the classes that a call may make: one, or two of (A if … else B)(…)."""
    if isinstance(called, ast.IfExp):
        yield from (*_made_by(called.body), *_made_by(called.orelse))
    else:
        yield ast.unparse(called).split(".")[-1]


def fields_of(text: str) -> set[str]:
    names = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    return {re.split(r"[.\[]", name)[0] for name in names}


def test_every_error_has_a_text_of_its_fields() -> None:
    """Beside its code; in SHARED if several places raise it."""
    wrong, used = [], Counter({"disk.full": 2, "disk.read-only": 2, "run.stopped": 2})
    for place, call, given in sites():
        match [arg.value if isinstance(arg, ast.Constant) else None for arg in call.args]:
            case [str(code)] if code in SHARED:
                text = SHARED[code]
            case [str(code), str(text)] if code not in SHARED | used:
                pass
            case _:
                wrong.append(f"{place}: wants a code and its text: {ast.unparse(call)}")
                continue
        used[code] += 1
        if not re.fullmatch(r"[a-z][a-z0-9]*\.[a-z0-9]+(-[a-z0-9]+)*", code):
            wrong.append(f"{place}: {code} is no area and a few words")
        if given != fields_of(text):
            wrong.append(f"{place}: {code} has {fields_of(text)}, not {given}")
    wrong += [f"SHARED: {code} belongs beside its raise" for code in SHARED if used[code] < 2]
    assert not wrong, "\n".join(wrong)


def test_an_error_keeps_its_code_and_fields_between_processes() -> None:
    error = DataError("data.not-there", "{path}: not there", path="value")
    error.exit_code = 7
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (copied.code, copied.fields) == ("data.not-there", {"path": "value"})
        assert str(copied) == "value: not there"
        assert copied.exit_code == 7


def test_a_message_alone_is_shown() -> None:
    """As the workers of torch's DataLoader make an error anew; nothing was shown."""
    assert str(InputError("Caught {in} a worker")) == "Caught {in} a worker"


def test_a_stop_has_a_code_of_its_own() -> None:
    """It is raised as a class: without arguments, an evaluation ended with a TypeError."""
    with pytest.raises(Stopped) as stopped:
        raise Requeued
    error = pickle.loads(pickle.dumps(stopped.value))
    assert (type(error), error.code, error.exit_code) == (Requeued, "run.stopped", 75)


def test_the_error_of_a_full_disk_has_a_code_too() -> None:
    error = pickle.loads(pickle.dumps(DiskError(28, "No space left on device", "/run")))
    assert error.code == "disk.full" and error.fields["path"] == "/run"
    assert str(error).startswith("/run: No space left on device; ")


def test_a_program_gets_the_code_and_fields(capsys: Capture) -> None:
    assert run("train", "digits", "--optim.lt", 3, "--json") == 2
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert error["code"] == "recipe.unknown-key" and error["fields"]["key"] == "optim.lt"
    assert printed.err == f"trainyard: {error['message']}\n"


def test_an_error_that_all_ranks_know_is_printed_once(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first rank alone, not by the first one of each node."""
    monkeypatch.setattr(command_line, "discover_or_alone", lambda: World(rank=8, size=16, node=1))
    error = DataError("pack.no-samples", split="train")
    for error.is_shared in (False, True):
        assert command_line.print_error(error) == 2
        assert bool(capsys.readouterr().err) == (not error.is_shared)


def test_no_secret_is_in_the_fields(capsys: Capture) -> None:
    url = "https://nowhere.invalid/shard.tar?sig=secret&Signature=secret&Expires=1"
    assert run("data", "show", url, "--json") != 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"]["code"] and "secret" not in printed.out + printed.err
