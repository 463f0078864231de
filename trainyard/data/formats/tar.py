"""The members of a tar by header alone: POSIX ustar and pax, GNU long names and sizes.

Fifteen times the speed of the standard library's tarfile, which matters at 11.6 million members;
it reads nothing but headers and trusts none of them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from trainyard.data.source import Source
from trainyard.errors import DataError

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_MAX_METADATA = 1 << 20  # bytes of a long name or pax header; real ones are under 10 kB


class Member(NamedTuple):
    name: str
    offset: int  # bytes from the start of the tar to the member's content
    size: int  # bytes


def members(tar: Source, start: int = 0, end: int | None = None) -> Iterator[Member]:
    """The regular files of a tar, or of one that lies inside another from byte `start` to `end`."""
    end = tar.size if end is None else end
    position = start
    override: dict[str, str] = {}  # path and size that a pax or GNU header sets for the next member
    while position + _BLOCK <= end:
        header = tar.read(position, _BLOCK)
        if header == _ZEROS:
            return
        where = f"{tar.name}, byte {position}"
        kind, size = header[156:157], _checked_size(header, where)
        content = position + _BLOCK
        if kind in _REGULAR:
            size = _decimal(override.get("size", str(size)), where)
        if content + size > end:
            raise DataError(f"{where}: the archive is truncated inside a member of {size:,} bytes")
        if kind in _REGULAR:
            name = override.get("path") or _name(header)
            if not name.endswith("/"):  # how tars older than POSIX mark a folder
                yield Member(name, content, size)
            override = {}
        elif kind in (b"x", b"L"):
            override |= _metadata(_small(tar, content, size, where), kind, where)
        else:  # a folder or a link: the override was its own
            override = {}
        position = content + -(-size // _BLOCK) * _BLOCK
    raise DataError(
        f"{tar.name}: the archive is truncated: it ends at byte {end} without its end mark"
    )


def _checked_size(header: bytes, where: str) -> int:
    total = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if _octal(header[148:156]) != total:
        raise DataError(f"{where}: not a tar header (its checksum does not match)")
    if header[156:157] in _WITHOUT_CONTENT:
        return 0
    field = header[124:136]
    if field[0] == 0x80:  # GNU: big-endian binary, for sizes of 8 GiB and more
        return int.from_bytes(field[1:], "big")
    size = _octal(field)
    if size is None:
        raise DataError(f"{where}: the member's size {field!r} is no octal number")
    return size


def _octal(field: bytes) -> int | None:
    digits = field.strip(b" \0") or b"0"
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        return None  # int() would also take signs and underscores
    return int(digits, 8)


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def _small(tar: Source, offset: int, size: int, where: str) -> bytes:
    if size > _MAX_METADATA:
        raise DataError(f"{where}: a name or pax header of {size:,} bytes is not believable")
    return tar.read(offset, size)


def _metadata(content: bytes, kind: bytes, where: str) -> dict[str, str]:
    if kind == b"L":
        return {"path": content.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    found = {}
    while content.strip(b"\0"):  # records of "LENGTH KEY=VALUE\n", LENGTH counting itself
        length = _decimal(content.split(b" ", 1)[0].decode("ascii", "replace"), where)
        key, equals, value = content[:length].partition(b" ")[2].partition(b"=")
        if not equals or length > len(content):
            raise DataError(f"{where}: broken pax header")
        if key in (b"path", b"size"):
            found[key.decode()] = value.removesuffix(b"\n").decode("utf-8", "surrogateescape")
        content = content[length:]
    return found


def _decimal(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < len(text) < 20:
        raise DataError(f"{where}: broken tar header: {text[:20]!r} is no number")
    return int(text)
