"""The same software on all hosts; an address of the first host that others reach."""

import socket

import pytest

from trainyard.launch.preflight import Doorbell, as_text, differences, reached


def test_addresses_that_lead_there() -> None:
    bell = Doorbell()
    try:
        found = bell.location(["127.0.0.1"], ["127.0.0.2"])
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
        port = second.location([], [])["port"]
        found = first.location(["127.0.0.1"], [])
        answer = reached(["127.0.0.1"], port, found["token"])
    finally:
        first.close()
        second.close()
    assert answer == {"addresses": [], "problems": ["127.0.0.1: another machine"]}


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ipv6() -> None:
    bell = Doorbell()
    try:
        found = bell.location(["::1"], ["::1"])
        assert reached(**found | {"names": ["::1"]})["addresses"] == ["::1"]
    finally:
        bell.close()


def test_differences_of_software() -> None:
    here = {"trainyard": "1.0", "code": "abc", "torch": "2.15.0"}
    there = {
        "a": here | {"torch": "2.15.0+cu130"},
        "b": here,
        "c": here | {"trainyard": "0.9"},
        "d": here | {"code": "def"},
        "e": here | {"torch": "not installed"},
    }
    assert differences({"a": there["a"], "f": there["a"]}, here) == {}
    problems = differences(there, here)
    assert problems == {
        "b": "torch 2.15.0 there, 2.15.0+cu130 on a: install the same",
        "c": "trainyard 0.9 there, 1.0 here: install the same",
        "d": "another code of trainyard 1.0 there (def) than here (abc): install the same",
        "e": "torch is not installed there",
    }
    head, *lines = as_text(problems, 5).splitlines()
    assert head == "4 of 5 hosts are not ready; nothing was started" and len(lines) == 4
