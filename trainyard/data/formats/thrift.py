"""Reads structs in Thrift's compact protocol: the headers of Parquet's pages.

(github.com/apache/thrift, doc/specs/thrift-compact-protocol.md)
"""

from typing import Any

Struct = dict[int, Any]
"""The fields by their numbers; a struct in it is another. Lists and maps are not supported."""
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 7, 8, 12
_INTEGERS = (4, 5, 6)
_DEEPEST = 8


def read_struct(content: bytes, at: int = 0, depth: int = 0) -> tuple[Struct, int]:
    """A struct that begins at byte `at`, and the byte after it. ValueError if it is damaged."""
    fields: Struct = {}
    number = 0
    if depth > _DEEPEST:
        raise ValueError("a damaged header")
    try:
        while head := content[at]:
            at += 1
            kind = head & 15
            if head >> 4:
                number += head >> 4
            else:
                number, at = _integer(content, at)
            fields[number], at = _value(content, at, kind, depth)
    except IndexError:
        raise ValueError("a header that is cut short") from None
    return fields, at + 1


def varint(content: bytes, at: int) -> tuple[int, int]:
    """An unsigned number, and the byte after it. IndexError if it is cut short."""
    value = shift = 0
    while True:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a damaged number")


def _integer(content: bytes, at: int) -> tuple[int, int]:
    value, at = varint(content, at)
    return value >> 1 ^ -(value & 1), at


def _value(content: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind in _INTEGERS:
        return _integer(content, at)
    if kind == _BYTE:
        return content[at], at + 1
    if kind == _DOUBLE:
        return None, at + 8
    if kind == _BINARY:
        length, at = varint(content, at)
        return content[at : at + length], at + length
    if kind == _STRUCT:
        return read_struct(content, at, depth + 1)
    raise ValueError("a damaged header")
