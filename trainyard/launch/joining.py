"""Hosts that come and go: torch's rendezvous, whose store is at one address of the first host."""

import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from trainyard.distributed.interfaces import local_address
from trainyard.errors import InputError

_LAST_CALL_S = 5  # for further hosts, once there are enough
_REACH_S = 10
_ANSWER_S = 60


def listen(address: str | None) -> tuple[str, socket.socket]:
    """Listen at an address of this host: the given one, else the one that its sshd was reached at.

    The store unpickles what it is sent, so nothing listens at other addresses. InputError if the
    address is not this host's.
    """
    of_sshd = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    name = address or next(iter(of_sshd), socket.gethostname())
    try:
        family, *_, socket_address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        return name, socket.create_server((socket_address[0], 0), family=family)
    except OSError as error:
        raise InputError(
            "launch.cannot-listen",
            "cannot listen at {address} ({reason}): --master-addr is to be an address of the "
            "first host, at which the others reach it",
            address=name,
            reason=error.strerror or str(error),
        ) from None


def rendezvous(
    endpoint: str, hosts: tuple[int, int], run: str, *, server: socket.socket | None, wait_s: float
) -> RendezvousHandler:
    """Where agents of `hosts` (at least, at most) meet. The first host has the `server`."""
    host, _, port = endpoint.rpartition(":")
    try:
        if server is None:  # torch itself would try for minutes
            socket.create_connection((host, int(port)), _REACH_S).close()
        address = local_address(host)
    except OSError as error:
        raise InputError(
            "launch.first-host-unreachable",
            "this host does not reach the first one at {address} ({reason}): open the ports "
            "between the hosts, or give an address that leads there: --master-addr",
            address=endpoint,
            reason=error.strerror or str(error),
        ) from None
    store = TCPStore(
        host,
        int(port),
        is_master=server is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=_ANSWER_S),
        master_listen_fd=None if server is None else server.detach(),
    )
    parameters = RendezvousParameters(
        "c10d",
        endpoint,
        run,
        *hosts,
        local_addr=address,
        join_timeout=int(wait_s),
        last_call_timeout=_LAST_CALL_S,
    )
    return create_handler(store, C10dRendezvousBackend(store, run), parameters)
