"""Reads pickles without running anything that they name.

A pickle is a program, which names classes and functions and calls them. This reader of its
instructions knows plain values alone; each call is a record of the name and its arguments.
"""

import pickletools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

_PLAIN = (str, bytes, int, float, bool, type(None))  # whose hashes are cheap and no program's
_EMPTY = {"EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_SET": set}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_SETS = ("builtins.set", "__builtin__.set")
_CALLS = ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST", "BINPERSID", "PERSID")
_SLICES = ("TUPLE", "LIST", "DICT", "FROZENSET", "OBJ", "INST", "APPENDS", "SETITEMS", "ADDITEMS")
_COUNTED = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}


@dataclass(eq=False, slots=True)
class Record:
    """An object that a pickle makes by a name: the name, and what it gets."""

    name: str
    """The module and the name in it; "" for what the pickle says by a persistent id."""
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    """The items that the pickle sets by keys."""


class _Name(str):
    """A class or a function, by its name."""


class _Machine:
    """The stack, the marks in it and the memo of a pickle."""

    def __init__(self, *, encoding: str) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._encoding = encoding
        self.persistent: list[Any] = []
        """The persistent ids of the pickle, in their order."""

    def run(self, content: bytes | BinaryIO) -> Any:
        """The object that the pickle leaves."""
        for code, argument, _ in pickletools.genops(content):
            if code.name == "STOP":
                break
            self._step(code.name, argument)
        return self._stack.pop()

    def _step(self, code: str, argument: Any) -> None:
        items = self._taken(code)
        if code == "MARK":
            self._marks.append(len(self._stack))
        elif code in _EMPTY:
            self._stack.append(_EMPTY[code]())
        elif code in _CONSTANTS:
            self._stack.append(_CONSTANTS[code])
        elif code in ("GLOBAL", "STACK_GLOBAL"):
            name = self._stack.pop() if argument is None else ""
            module = self._stack.pop() if argument is None else argument
            self._stack.append(_Name(f"{module} {name}".strip().replace(" ", ".")))
        elif code in _CALLS:
            self._stack.append(self._called(code, argument, items))
        elif code == "BUILD":
            state = self._stack.pop()
            if isinstance(self._stack[-1], Record):
                self._stack[-1].state = state
        elif items is not None:
            self._put(code, items)
        else:
            self._remember(code, argument)

    def _taken(self, code: str) -> list[Any] | None:
        """The items that an instruction takes off the stack together."""
        if code not in _SLICES and code not in _COUNTED:
            return None
        start = self._marks.pop() if code in _SLICES else len(self._stack) - _COUNTED[code]
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _called(self, code: str, argument: Any, items: list[Any] | None) -> Any:
        if "PERSID" in code:
            self.persistent.append(argument if code == "PERSID" else self._stack.pop())
            return Record("", (self.persistent[-1],))
        if items is not None:
            name, *arguments = items if code == "OBJ" else [argument.replace(" ", "."), *items]
        else:
            if code == "NEWOBJ_EX":
                self._stack.pop()  # arguments by name
            arguments, name = self._stack.pop(), self._stack.pop()
        if name in _SETS and arguments:
            return {item for item in arguments[0] if type(item) in _PLAIN}
        if name == "_codecs.encode" and list(arguments[1:]) == ["latin1"]:  # bytes, in protocol 2
            return str(arguments[0]).encode("latin1")
        return Record(name if isinstance(name, str) else "?", tuple(arguments))

    def _put(self, code: str, items: list[Any]) -> None:
        if code.startswith("TUPLE"):
            self._stack.append(tuple(items))
        elif code == "LIST":
            self._stack.append(items)
        elif code == "DICT":
            self._stack.append(dict(_pairs(items)))
        elif code == "FROZENSET":
            self._stack.append(frozenset(item for item in items if type(item) in _PLAIN))
        else:
            target = self._stack[-1]
            if isinstance(target, list) and code.startswith("APPEND"):
                target.extend(items)
            elif isinstance(target, set) and code == "ADDITEMS":
                target.update(item for item in items if type(item) in _PLAIN)
            elif isinstance(target, dict | Record) and code.startswith("SETITEM"):
                (target if isinstance(target, dict) else target.items).update(_pairs(items))

    def _remember(self, code: str, argument: Any) -> None:
        if code in ("PROTO", "FRAME"):
            return
        if code in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else int(argument)] = self._stack[-1]
        elif code in ("GET", "BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[int(argument)])
        elif code == "POP":
            self._stack.pop()
        elif code == "POP_MARK":
            del self._stack[self._marks.pop() :]
        elif code == "DUP":
            self._stack.append(self._stack[-1])
        elif argument is None:
            raise ValueError(f"the instruction {code}")
        else:
            is_of_python_2 = code in ("STRING", "BINSTRING", "SHORT_BINSTRING")
            as_bytes = is_of_python_2 and self._encoding == "bytes"
            self._stack.append(argument.encode("latin1") if as_bytes else argument)


def _pairs(items: list[Any]) -> Iterable[tuple[Any, Any]]:
    pairs = zip(items[::2], items[1::2], strict=True)
    return ((key, value) for key, value in pairs if type(key) in _PLAIN)


def read_records(
    content: bytes | BinaryIO, *, encoding: str = "latin1", persistent: list[Any] | None = None
) -> Any:
    """The object in a pickle, with a Record for everything that it makes by a name.

    Keys of dicts and items of sets that are no texts, bytes or numbers are left out. `encoding`:
    "bytes" leaves the texts of Python 2 as they are. `persistent` gets the persistent ids. Almost
    any error for a damaged pickle.
    """
    machine = _Machine(encoding=encoding)
    value = machine.run(content)
    if persistent is not None:
        persistent += machine.persistent
    return value
