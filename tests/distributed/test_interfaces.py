"""At which addresses a rank listens, and by which interface it talks."""

import os
import socket
from typing import Any

import pytest

from trainyard.distributed.interfaces import name_of, outward, server, use_interface_to

ELSEWHERE = "192.0.2.1"  # an address for documentation: nobody's


def listens_at(host: str, *, for_others: bool) -> str:
    with server(host, 0, for_others=for_others) as listening:
        return str(listening.getsockname()[0])


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Host names, and the addresses that they are to have."""
    known: dict[str, str] = {}
    look_up = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        return look_up(known.get(host, host), *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


def test_it_listens_at_the_address_given_and_no_other(names: dict[str, str]) -> None:
    assert listens_at("127.0.0.1", for_others=True) == "127.0.0.1"
    assert listens_at("::1", for_others=False) == "::1"
    names["me"] = "127.0.1.1"  # as Debian has the machine's own name in /etc/hosts
    assert listens_at("me", for_others=False) == "127.0.1.1"


def test_it_listens_everywhere_where_that_would_lead_nobody_here(names: dict[str, str]) -> None:
    everywhere = ("::", "0.0.0.0")
    names["me"] = "127.0.1.1"
    assert listens_at("me", for_others=True) in everywhere
    assert listens_at(ELSEWHERE, for_others=True) in everywhere
    assert listens_at("nowhere.invalid", for_others=True) in everywhere


def test_a_port_that_is_taken() -> None:
    with server("127.0.0.1", 0, for_others=False) as first, pytest.raises(OSError, match="in use"):
        server("127.0.0.1", first.getsockname()[1], for_others=False)


def test_the_address_by_which_others_have_come() -> None:
    assert outward(["127.0.0.1", "::ffff:10.0.0.5", "10.0.1.5"]) == "10.0.0.5"
    assert outward(["127.0.0.1", "::1"]) == "127.0.0.1"
    assert outward(["fe80::1%eth0"]) == "fe80::1"


def test_the_interface_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_of("127.0.0.1") == name_of("::1") == name_of("::ffff:127.0.0.1") == "lo"
    assert name_of(ELSEWHERE) is None
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    use_interface_to("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    use_interface_to("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
