"""At which addresses and ports the processes of an emulated host listen."""

from ipaddress import IPv4Address, IPv6Address, ip_address

from tests.services.network import Host

_LISTEN = "0A"


def listening(host: Host) -> set[tuple[IPv4Address | IPv6Address, int]]:
    """Read from /proc/net/tcp and tcp6, as proc(5) describes them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in host.run("cat", table).splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == _LISTEN:
                digits, _, port = local.partition(":")
                words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
                packed = b"".join(word.to_bytes(4, "little") for word in words)
                found.add((ip_address(packed), int(port, 16)))
    return found
