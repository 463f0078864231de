"""Lists the members of a tar by headers alone: POSIX ustar and pax, GNU long names and sizes.

Eight times as fast as the standard library's tarfile, which matters at 11.6 million members. Only
headers are read, and no header is trusted. Folders are not listed. Links, devices and pipes have no
content; one that is named like an image or a tar is an error, since images would be missing.
"""

import struct
import sys
from collections.abc import Generator, Iterator
from typing import IO, NamedTuple
from zlib import adler32

from trainyard.data.formats.left_out import HIDDEN, ending
from trainyard.data.formats.scan import IMAGE_SUFFIXES, is_hidden
from trainyard.data.storage.source import Closing, Source, Stamp
from trainyard.errors import DataError

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_AHEAD = 1 << 18  # bytes read at once for small members
_NEAR = 1 << 15  # bytes; shorter gaps are read, not skipped; ImageNet's files are longer
_PAGE = 1 << 12  # bytes; the least that a disk reads
_FIND = 1 << 16  # bytes searched for a header at once
_MAGIC = 257  # byte offset of "ustar" in a header
END = sys.maxsize
"""The position after the end mark of a tar."""
_PROBES = 128  # positions; enough to find a split that is one per cent of the tar
_MAX_METADATA = 1 << 20  # bytes of a long name or pax header; real ones are under 10 kB
_MAX_READ = 1 << 30  # bytes; a longer image in a stream means damage

# name, size, checksum, kind, magic, prefix
_HEADER = struct.Struct("100s24x12s12x8sc100x8s80x155s12x")
_REGULAR = b"0\0007"
_WITHOUT_CONTENT = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "a folder",
    b"6": "a pipe",
}
_COMPRESSIONS = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
}


class Member(NamedTuple):
    name: str
    offset: int  # bytes from the start of the tar to the member's content
    size: int  # bytes


class _Broken(Exception):
    """A problem of a header; `walk` adds its position."""


class _Compressed(_Broken):
    """The archive is compressed; the argument is the tool that decompresses it."""


class _PointsOut(_Broken):
    """The member of this name would lie outside of the archive."""


class _Sparse(_Broken):
    """A file with holes is not stored in one piece."""


class _Link(_Broken):
    """The member is no file; the arguments are its name and what it is."""


class BufferedTarReader(Closing):
    """A source for one thread that reads it from front to back.

    After a large step, one page is read. Small steps share reads that grow up to `ahead` bytes.
    """

    def __init__(self, source: Source, *, ahead: int = _AHEAD, page: int = _PAGE) -> None:
        self._source, self._ahead, self._page = source, ahead, page
        self.name, self.size = source.name, source.size
        self.stamp: Stamp = source.stamp
        self._content = b""
        self._start = 0
        self._last = -_NEAR  # end of the last step; the first, perhaps the only one, is large

    def read(self, offset: int, size: int) -> bytes:
        begin = offset - self._start
        if begin < 0 or begin + size > len(self._content):
            is_near = 0 <= offset - self._last < _NEAR
            ahead = min(2 * len(self._content), self._ahead) if is_near else self._page
            self._content = self._source.read(offset, max(size, min(ahead, self.size - offset)))
            self._start, begin = offset, 0
        self._last = offset + size
        return self._content[begin : begin + size]

    def close(self) -> None:
        self._source.close()


class SequentialReader(Closing):
    """A tar that can be read only once, from front to back, of unknown length."""

    size = sys.maxsize

    def __init__(self, name: str, stream: IO[bytes]) -> None:
        self.name, self.stamp = name, Stamp()
        self._stream, self._position = stream, 0

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes further on. DataError if the stream ends before."""
        if size > _MAX_READ:
            reason = f"{size:,} bytes are implausible"
            raise DataError("tar.damaged", path=self.name, offset=offset, reason=reason)
        while self._position < offset:
            self._take(min(offset - self._position, _AHEAD))
        return self._take(size)

    def finish(self) -> None:
        """Reads the bytes after the end mark. DataError if they are more than padding."""
        while content := self._stream.read(_AHEAD):
            if content.strip(b"\0"):
                raise DataError("tar.second-archive", path=self.name, offset=self._position)

    def close(self) -> None:
        self._stream.close()

    def _take(self, size: int) -> bytes:
        content = self._stream.read(size)
        self._position += len(content)
        if len(content) < size:
            raise DataError("tar.truncated", path=self.name, offset=self._position)
        return content


def members(tar: Source, start: int = 0, end: int | None = None) -> Iterator[Member]:
    """The members of a tar that are no folders, or of one inside another, from byte `start` to
    `end`. DataError for a second archive behind the end mark.
    """
    tar = tar if isinstance(tar, (BufferedTarReader, SequentialReader)) else BufferedTarReader(tar)
    end = tar.size if end is None else end
    yield from walk(tar, start, until=end, end=end)


def walk(
    tar: BufferedTarReader | SequentialReader, start: int, *, until: int, end: int
) -> Generator[Member, None, int]:
    """The members, without folders, from the header at byte `start` to the last before `until`.

    Returns the position of the next header; `END` if there is none.
    """
    position = start
    override: dict[str, str] = {}  # the next member's path and size, from a pax or GNU header
    while position + _BLOCK <= end:
        if position >= until and not override:
            return position
        block = tar.read(position, _BLOCK)
        if block == _ZEROS:
            if isinstance(tar, BufferedTarReader):  # a stream is finished by its user
                _check_end(tar, position, end)
            return END
        try:
            name, kind, size = _parse(block, override)
            member = Member(name, position + _BLOCK, size)
            if member.offset + size > end:
                raise DataError(
                    "tar.truncated-member",
                    "{path}, byte {offset}: the archive is truncated inside a member of {size:,} "
                    "bytes",
                    path=tar.name,
                    offset=position,
                    size=size,
                )
            is_file = kind in _REGULAR
            override = {} if is_file else _override(tar, member, kind, override)
        except _Broken as error:
            raise _error(tar.name, position, error) from None
        # Tars older than POSIX mark a folder by a slash.
        if (is_file and name[-1:] != "/") or (kind in _WITHOUT_CONTENT and kind != b"5"):
            yield member
        position = member.offset + -(-size // _BLOCK) * _BLOCK
    raise DataError("tar.truncated", path=tar.name, offset=end)


def find_header(tar: BufferedTarReader, start: int, until: int) -> int | None:
    """The first block from byte `start` to `until` that looks like a header of POSIX or GNU.

    The block may be part of a member that is a tar itself.
    """
    for begin in range(start, until, _FIND):
        content = tar.read(begin, min(_FIND, until - begin, tar.size - begin))
        for position in range(0, len(content) - _BLOCK + 1, _BLOCK):
            if content[position + _MAGIC : position + _MAGIC + 5] == b"ustar":
                try:
                    _parse(content[position : position + _BLOCK], {})
                except _Broken:
                    continue
                return begin + position
    return None


def _check_end(tar: BufferedTarReader, position: int, end: int) -> None:
    """DataError if there is more than padding behind the end mark at byte `position`."""
    for start in range(position, end, _AHEAD):
        if tar.read(start, min(_AHEAD, end - start)).strip(b"\0"):
            raise DataError("tar.second-archive", path=tar.name, offset=position)


def _error(path: str, offset: int, broken: _Broken) -> DataError:
    """The error of a problem of the header at a byte of a tar."""
    match broken:
        case _Compressed():
            return DataError("tar.compressed", path=path, hint=f" ({broken})")
        case _PointsOut():
            return DataError(
                "tar.member-outside",
                "{path}, byte {offset}: the member {name!r} points out of the archive; do not "
                "trust this file",
                path=path,
                offset=offset,
                name=str(broken),
            )
        case _Sparse():
            return DataError(
                "tar.sparse-file",
                "{path}, byte {offset}: a file with holes is not stored in one piece; write the "
                "archive without tar --sparse",
                path=path,
                offset=offset,
            )
        case _Link():
            name, kind = broken.args
            return DataError(
                "tar.no-file",
                "{path}, byte {offset}: {name!r} is {kind}, not a file; write the archive with "
                "tar --dereference --hard-dereference",
                path=path,
                offset=offset,
                name=name,
                kind=kind,
            )
    return DataError("tar.damaged", path=path, offset=offset, reason=str(broken))


def some_names(tar: Source) -> Iterator[str]:
    """Names of some members from all over a tar, by few reads; long names are cut short."""
    step = max(tar.size // _PROBES // _BLOCK * _BLOCK, _AHEAD)
    for start in range(0, tar.size, step):
        content = tar.read(start, min(_AHEAD, tar.size - start))
        for position in range(0, len(content) - _BLOCK + 1, _BLOCK):
            block = content[position : position + _BLOCK]
            if block[156:157] in _REGULAR and block != _ZEROS:  # else no file's header
                try:
                    yield _parse(block, {})[0]
                except _Broken:  # content of a file
                    continue


def is_image(name: str) -> bool:
    """True if a member is an image by its name, and neither hidden nor in a hidden folder.

    Examples of hidden ones are macOS's `._NAME` beside a file and `.ipynb_checkpoints`.
    """
    return name[name.rfind(".") :].lower() in IMAGE_SUFFIXES and not _is_hidden(name)


def why_left_out(name: str) -> str:
    """The kind as which a member that is no image is left out."""
    return HIDDEN if _is_hidden(name) else ending(name)


def _is_hidden(name: str) -> bool:
    if not (name[:1] == "." or "/." in name or "__MACOSX" in name):  # true of nearly all names
        return False
    return any(is_hidden(part) for part in name.split("/") if part not in (".", ".."))


def _parse(block: bytes, override: dict[str, str]) -> tuple[str, bytes, int]:
    """Name, kind and size in bytes."""
    name_field, size_field, checksum, kind, magic, prefix = _HEADER.unpack(block)
    # The low half of Adler-32 is one plus the sum of the bytes, modulo 65521: a fast way to the
    # checksum. The checksum field itself counts as eight spaces.
    total = (adler32(block) & 0xFFFF) - (adler32(checksum) & 0xFFFF) + 8 * ord(" ")
    stored = _octal(checksum)
    if stored is None or (total - stored) % 65521:
        raise _no_header(block)
    if override and kind in _REGULAR and "size" in override:
        size = _decimal(override["size"])
    else:
        size = 0 if kind in _WITHOUT_CONTENT else _size(size_field)
    if "path" in override:
        name = override["path"]
    else:
        raw = name_field.partition(b"\0")[0]
        if prefix[0] and magic.startswith(b"ustar\0"):
            raw = prefix.partition(b"\0")[0] + b"/" + raw
        name = raw.decode("utf-8", "surrogateescape")
    if name.startswith("/") or (".." in name and ".." in name.split("/")):
        raise _PointsOut(name[:200])
    return name, kind, size


def _no_header(block: bytes) -> _Broken:
    for magic, tool in _COMPRESSIONS.items():
        if block.startswith(magic):
            return _Compressed(tool)
    return _Broken("not a tar header (its checksum does not match)")


def _size(field: bytes) -> int:
    if field[0] == 0x80:  # GNU: big-endian binary, for sizes of 8 GiB and more
        return int.from_bytes(field[1:], "big")
    size = _octal(field)
    if size is None:
        raise _Broken(f"the member's size {field!r} is not an octal number")
    return size


def _octal(field: bytes) -> int | None:
    digits = field.strip(b" \0") or b"0"
    if not digits.isdigit():  # int() would also take signs and underscores
        return None
    try:
        return int(digits, 8)
    except ValueError:  # 8 or 9
        return None


def _override(tar: Source, member: Member, kind: bytes, override: dict[str, str]) -> dict[str, str]:
    """The values that the headers so far set for the next member; `member` is no file."""
    if kind in b"xXLg":
        if member.size > _MAX_METADATA:
            raise _Broken(f"a name or pax header of {member.size:,} bytes is not believable")
        text = tar.read(member.offset, member.size)
        if kind == b"L":
            return override | {"path": _text(text.partition(b"\0")[0])}
        found = _pax_records(text)
        if found and kind == b"g":
            raise _Broken("a pax header gives all members one name or size")
        return override | found
    if kind == b"S":
        raise _Sparse
    is_wanted = is_image(member.name) or member.name.endswith(".tar")
    if kind in _WITHOUT_CONTENT and kind != b"5" and is_wanted:
        raise _Link(member.name, _WITHOUT_CONTENT[kind])
    return {}


def _pax_records(content: bytes) -> dict[str, str]:
    """The path and size in records of "LENGTH KEY=VALUE\n", where LENGTH counts itself."""
    found = {}
    position = 0
    while position < len(content) and content[position]:
        space = content.find(b" ", position, position + 20)
        length = _decimal(_text(content[position : max(space, position)]))
        record = content[space + 1 : position + length]
        key, equals, value = record.partition(b"=")
        if not equals or position + length > len(content):
            raise _Broken("broken pax header")
        if key.startswith(b"GNU.sparse."):
            raise _Sparse
        if key in (b"path", b"size"):
            found[key.decode()] = _text(value.removesuffix(b"\n"))
        position += length
    if "\0" in found.get("path", ""):
        raise _Broken("broken pax header: a name with a zero byte")
    return found


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _decimal(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < len(text) < 20:
        raise _Broken(f"broken tar header: {text[:20]!r} is no number")
    return int(text)
