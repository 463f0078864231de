"""An address of the first host that others reach, and a free port."""

import socket

import pytest

from trainyard.launch.meeting_point import Doorbell, reached


def test_addresses_that_lead_there() -> None:
    bell = Doorbell()
    try:
        found = bell.as_found(["127.0.0.1"], ["127.0.0.2"])
        assert found["names"] == ["127.0.0.1", "127.0.0.1", socket.gethostname()][::2]
        found["names"] = ["no.such.invalid", "localhost", "127.0.0.2"]
        answer = reached(**found)
    finally:
        bell.close()
    assert answer["addresses"][-1] == "127.0.0.2" and len(answer["addresses"]) == 2
    assert [problem.partition(":")[0] for problem in answer["problems"]] == ["no.such.invalid"]
    with socket.create_server(("127.0.0.1", found["port"])):  # it is free again
        pass


def test_another_machine_at_the_same_address() -> None:
    first, second = Doorbell(), Doorbell()
    try:
        port = second.as_found([], [])["port"]
        found = first.as_found(["127.0.0.1"], [])
        answer = reached(["127.0.0.1"], port, found["token"])
    finally:
        first.close()
        second.close()
    assert answer == {"addresses": [], "problems": ["127.0.0.1: another machine"]}


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ipv6() -> None:
    bell = Doorbell()
    try:
        found = bell.as_found(["::1"], ["::1"])
        assert reached(**found | {"names": ["::1"]})["addresses"] == ["::1"]
    finally:
        bell.close()
