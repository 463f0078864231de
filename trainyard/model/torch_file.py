"""Reads the tensors in a torch file, whatever else it holds; nothing in it is run.

torch's own safe reader refuses a file with any other object in it: a number of NumPy, a path, a
whole model, the options of a trainer. Here these are records (trainyard/pickle_records.py), and
tensors are made of the file's bytes.
"""

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainyard.pickle_records import Record, read_records

_MAGIC = 0x1950A86A20F9469CFC6C  # of files before torch 1.6
_REBUILD = "torch._utils._rebuild_"
_OF_MODULES = "_parameters", "_buffers", "_modules"

Storages = dict[str, Tensor]


def read_torch_file(path: Path) -> Any:
    """The content of a file of torch.save: dicts, lists, tensors, and records of all else.

    A module is a dict of its weights. Almost any error for a damaged file.
    """
    persistent, storages = list[Any](), Storages()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            folder = pickled.removesuffix("data.pkl")
            order = f"{folder}byteorder"
            if order in archive.namelist() and archive.read(order) != b"little":
                raise ValueError("its numbers have the other byte order")
            value = read_records(archive.read(pickled), persistent=persistent)
            for key, kind, _ in _storages_in(persistent):
                storages[key] = _numbers(_stored(archive, f"{folder}data/{key}"), kind)
    else:
        with path.open("rb") as file:
            if read_records(file) != _MAGIC:
                raise ValueError("it is no torch file")
            _, about = read_records(file), read_records(file)
            if not about["little_endian"]:
                raise ValueError("its numbers have the other byte order")
            value = read_records(file, persistent=persistent)
            known = {key: (kind, count) for key, kind, count in _storages_in(persistent)}
            for key in read_records(file):
                storages[key] = _numbers(_following(file, *known[key]), known[key][0])
    return _Tensors(storages).restored(value)


def _storages_in(persistent: list[Any]) -> Iterator[tuple[str, torch.dtype, int]]:
    """The key, the numbers' kind and their count of each storage that a pickle names."""
    for pid in persistent:
        what, kind, key, _, count, *_ = pid
        if what == "storage":
            name = str(kind).rpartition(".")[2]
            storage = torch.serialization.StorageType(name)  # type: ignore[no-untyped-call]
            yield key, storage.dtype, count


def _stored(archive: zipfile.ZipFile, name: str) -> bytearray:
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED:  # so that a file is as large as what it holds
        raise ValueError("its numbers are compressed")
    return bytearray(archive.read(entry))


def _following(file: BinaryIO, kind: torch.dtype, count: int) -> bytearray:
    if int.from_bytes(file.read(8), "little") != count:
        raise ValueError("its numbers are not as many as it says")
    content = bytearray(file.read(count * kind.itemsize))
    if len(content) < count * kind.itemsize:
        raise EOFError("it is cut off")
    return content


def _numbers(content: bytearray, kind: torch.dtype) -> Tensor:
    return torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)


class _Tensors:
    """Makes tensors of records and storages."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._open = set[int]()
        """Ids of what is being restored, which may hold itself."""

    def restored(self, value: Any) -> Any:
        """A value with tensors in place of their records."""
        if id(value) in self._open or not isinstance(value, dict | list | tuple | Record):
            return value
        self._open.add(id(value))
        try:
            if isinstance(value, Record):
                return self._of_record(value)
            if isinstance(value, dict):
                return {key: self.restored(one) for key, one in value.items()}
            return [self.restored(one) for one in value]
        finally:
            self._open.remove(id(value))

    def _of_record(self, record: Record) -> Any:
        name = record.name.removeprefix(_REBUILD)
        if name in ("parameter", "parameter_with_state"):
            return self.restored(record.arguments[0])
        if name in ("tensor", "tensor_v2"):
            storage, offset, size, stride, *_ = record.arguments
            return self._storages[storage.arguments[0][2]].as_strided(size, stride, offset)
        if isinstance(record.state, Mapping) and all(key in record.state for key in _OF_MODULES):
            return dict(self._weights_of(record.state))
        return self.restored(record.items) or record

    def _weights_of(self, module: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The entries of a module's state_dict, from its attributes."""
        parts = [self.restored(_items(module[key])) for key in _OF_MODULES]
        unsaved = module.get("_non_persistent_buffers_set") or ()
        for key, tensor in {**parts[0], **parts[1]}.items():
            if isinstance(tensor, Tensor) and key not in unsaved:
                yield key, tensor
        for key, inner in parts[2].items():
            for name, tensor in inner.items() if isinstance(inner, dict) else ():
                yield f"{key}.{name}", tensor


def _items(value: Any) -> Any:
    """The items of a dict, also of one in the form of a record."""
    return value.items if isinstance(value, Record) else value
