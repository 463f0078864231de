"""Errors wanted by code and fields, so that a message can be reworded."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.command_line import run
from trainyard import command_line
from trainyard.errors import TrainyardError


@contextmanager
def raises(code: str, /, **fields: object) -> Iterator[pytest.ExceptionInfo[TrainyardError]]:
    """Want an error of this code, and of these fields among its own: see `check`."""
    with pytest.raises(TrainyardError) as caught:
        yield caught
    check(caught.value, code, **fields)


def refused(*arguments: object, exit_code: int = 2) -> TrainyardError:
    """The error that ends a command: with exit code 2, one that refuses its input."""
    errors: list[TrainyardError] = []

    def note(error: TrainyardError, *, as_json: bool = False) -> int:
        errors.append(error)
        return error.exit_code

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "print_error", note)
        assert run(*arguments) == exit_code
    (error,) = errors
    return error


def check(error: TrainyardError, code: str, **fields: object) -> None:
    """Compare the code, and fields by their text, with which a path equals its name."""
    message = str(error)  # the message itself takes all its fields, whatever is wanted of them
    assert error.code == code, message
    found = {name: str(value) for name, value in error.fields.items() if name in fields}
    assert found == {name: str(value) for name, value in fields.items()}, message
