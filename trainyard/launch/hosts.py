"""Host lists as a user writes them: a,b:4,user@c, or a file with one host per line."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from trainyard.errors import InputError

# a, user@a, a:4, ::1, [::1], [::1]:4; an IPv6 address needs brackets if a number follows
_HOST = re.compile(
    r"(?P<user>.*@)?(\[(?P<address>[^\[\]@]+)\]|(?P<name>[^:@]+|[^@]*:[^@]*:[^@]*))(:(?P<slots>[0-9]+))?"
)
_SLOTS = re.compile(r"slots=(?P<slots>[0-9]+)")


@dataclass(frozen=True)
class GivenHost:
    target: str
    """ssh destination: user@name, or a name from the ssh configuration."""
    slots: int | None = None
    """Number of ranks, if given."""

    @property
    def name(self) -> str:
        """The host without the user."""
        return self.target.rpartition("@")[2]


def read_hosts(given: str) -> list[GivenHost]:
    """InputError, with the line of a file, for an invalid or repeated host."""
    path = Path(given)
    if os.path.isfile(given):  # a long host list exceeds the length limit of a Path's name
        lines = path.read_text().splitlines()
        entries = [(f"{path}, line {number}", line) for number, line in enumerate(lines, 1)]
    elif "/" in given:
        raise InputError(
            "launch.no-such-hosts-file", "--hosts: there is no file {path}", path=given
        )
    else:
        entries = [("--hosts", entry) for entry in given.split(",")]
    entries = [(where, entry.partition("#")[0].strip()) for where, entry in entries]
    hosts: dict[str, GivenHost] = {}
    for where, entry in entries:
        if not entry:
            continue
        host = _host(where, entry)
        if host.name in hosts:
            raise InputError(
                "launch.host-named-twice",
                "{where}: {name} stands there twice; for two ranks: {name}:2",
                where=where,
                name=host.name,
            )
        hosts[host.name] = host
    if not hosts:
        raise InputError("launch.no-hosts", "--hosts: there are no hosts in {value!r}", value=given)
    return list(hosts.values())


def _host(where: str, entry: str) -> GivenHost:
    name, *options = entry.split()
    parts = _HOST.fullmatch(name)
    slots = parts and parts["slots"]
    for option in options:
        match = _SLOTS.fullmatch(option)
        if match is None or slots is not None:
            raise InputError(
                "launch.malformed-slots",
                "{where}: {value!r} is not slots=N, the number of ranks on a host",
                where=where,
                value=option,
            )
        slots = match["slots"]
    target = parts and (parts["user"] or "") + (parts["address"] or parts["name"])
    if not target or target.startswith("-") or slots == "0":
        raise InputError(
            "launch.malformed-host",
            "{where}: {value!r} is no host: a, user@a, a:4 or [2001:db8::1]:4",
            where=where,
            value=entry,
        )
    return GivenHost(target, None if slots is None else int(slots))
