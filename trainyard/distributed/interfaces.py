"""This machine's network addresses: where to listen, and the interface to reach other hosts."""

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from trainyard.distributed.launcher_variables import is_loopback

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # see netdevice(7)
_ANY_PORT = 9
_WAITING = 4096  # connections not yet accepted
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def server(host: str, port: int, *, for_others: bool) -> socket.socket:
    """Listens at this address of the machine only, or at all addresses in three cases:

    the address belongs to another machine, say a load balancer; the name is not known yet; or the
    name means loopback here, though there are ranks `for_others`.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not for_others or is_loopback(host) or not is_loopback(str(address[0])):
            return socket.create_server(address, family=family, backlog=_WAITING)
    except socket.gaierror:
        pass
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_WAITING, dualstack_ipv6=dual)


def free_port() -> int:
    """A port of this machine that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


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
    one = ip_address(address.partition("%")[0])
    mapped = one.ipv4_mapped if isinstance(one, IPv6Address) else None
    return mapped or one


def name_of(address: str) -> str | None:
    """The interface with an address; None if there is none."""
    wanted = _plain(address)
    if wanted.is_loopback:
        return "lo"
    if wanted.version == 6:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        names = {int(line.split()[0], 16): line.split()[-1] for line in lines}
        return names.get(int(wanted))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                ip = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(ip) == str(wanted):
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
