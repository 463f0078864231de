"""This machine's network addresses: where to listen, and the interface to reach other hosts."""

import errno
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from trainyard.distributed.launcher_variables import is_loopback

_SIOCGIFADDR = 0x8915  # see netdevice(7)
_ANY_PORT = 9
_WAITING = 4096  # connections not yet accepted
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def server(host: str, port: int, *, for_others: bool) -> socket.socket:
    """Listens at this address of the machine only, or at all addresses in three cases:

    the address belongs to another machine, say a load balancer; the name is not known yet; or the
    name means loopback here, though there are ranks `for_others`.
    """
    found = _resolved(host, port)
    leads_astray = for_others and not is_loopback(host) and found and is_loopback(found[1][0])
    if found and not leads_astray:
        family, address = found
        try:
            return socket.create_server(address, family=family, backlog=_WAITING)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return server_for_all(port)


def server_for_all(port: int) -> socket.socket:
    """Listens at all addresses of the machine."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_WAITING, dualstack_ipv6=dual)


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]] | None:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        return None
    return family, (str(address[0]), int(address[1]))


def is_own(host: str) -> bool:
    """True if a host is this machine, or its name is unknown."""
    found = _resolved(host, 0)
    if found is None:
        return True
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(found[1])
        except OSError:
            return False
    return True


def local_address(host: str) -> str:
    """This machine's own address on the route to `host`; sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, _ANY_PORT, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def outward(addresses: Iterable[str]) -> str:
    """The first of the ranks' addresses that is not loopback; else the first one."""
    plain = [_plain(address) for address in addresses]
    return str(next((one for one in plain if not one.is_loopback), plain[0]))


def _plain(address: str) -> IPv4Address | IPv6Address:
    found = ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


def name_of(address: str) -> str | None:
    """The interface with an address; None if there is none, or on macOS, but for loopback."""
    wanted = _plain(address)
    if wanted.is_loopback:
        return "lo0" if sys.platform == "darwin" else "lo"
    if sys.platform == "darwin":  # what follows is of Linux
        return None
    if wanted.version == 6:
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if int(digits, 16) == int(wanted):
                return name
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(found) == str(wanted):
                    return name
    return None


def use_interface_to(address: str) -> None:
    """Makes gloo and NCCL use the interface to an address, unless their variables are set.

    By default gloo uses the interface of the host's name: none, or loopback, if the name is not
    known.
    """
    name = name_of(local_address(address))
    for variable in _VARIABLES if name is not None else ():
        if name != "lo" or variable.startswith("GLOO"):  # NCCL needs no interface inside a machine
            os.environ.setdefault(variable, str(name))
