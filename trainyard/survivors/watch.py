"""A line to every other rank: when one breaks, this rank hears of it, whatever it waits for."""

import os
import selectors
import socket
import stat
import threading
from contextlib import closing, suppress
from ipaddress import ip_address

from trainyard.errors import PeerError
from trainyard.world import World, gather, together

_JOIN_S = 60
# What the kernel asks over a line that is silent: a host that has lost power is missed after 10 s.
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 4,  # s
    socket.TCP_KEEPINTVL: 2,  # s
    socket.TCP_KEEPCNT: 3,
}
_GOODBYE = b"."


class Watch:
    """Hears at once when the process of a rank ends, and within 10 s when its host does.

    Torch tells only the ranks that a dead one was to talk to; others wait for those. Here the first
    rank has a line to each of the others. When one breaks, it cuts all of its own connections,
    torch's and the lines, and so does each rank that hears of it in this way: whoever waits for a
    message gets an error in its place. A rank that is only slow breaks nothing.
    """

    def __init__(self, world: World) -> None:
        """Every rank of a world of several calls it."""
        self.has_alarm = False
        self._lines = _connect(world)
        self._close, self._closed = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="watch", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for line in (self._closed, *self._lines):
                selector.register(line, selectors.EVENT_READ, line)
            while True:
                for key, _ in selector.select():
                    if key.data is self._closed:
                        return
                    if not _says_goodbye(key.data):
                        self.alarm()
                        return
                    selector.unregister(key.data)

    def alarm(self) -> None:
        """A rank is lost: so is all that is still to be said between ranks."""
        self.has_alarm = True
        _cut_connections()

    def close(self, *, in_peace: bool) -> None:
        """Stop listening. The others take it for a loss, unless it is `in_peace`."""
        for line in self._lines if in_peace else ():
            with suppress(OSError):
                line.sendall(_GOODBYE)
        self._close.close()
        self._thread.join()
        for line in (self._closed, *self._lines):
            line.close()


def _connect(world: World) -> list[socket.socket]:
    """The first rank's lines to all others, or another rank's line to the first."""
    host = os.environ["MASTER_ADDR"]
    with closing(_server(host, world)) as server:
        address = (host, gather(world, server.getsockname()[1])[0])
        with together(world):
            server.settimeout(_JOIN_S)
            try:
                if world.is_first:
                    lines = [server.accept()[0] for _ in range(world.size - 1)]
                else:
                    lines = [socket.create_connection(address, _JOIN_S)]
            except OSError as error:
                raise PeerError(f"no connection to rank 0 at {address}: {error}") from None
    for line in lines:
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            line.setsockopt(socket.IPPROTO_TCP, option, value)
    return lines


def _server(host: str, world: World) -> socket.socket:
    """Listens on this machine alone, where all ranks are on it, else everywhere."""
    family, *_, address = socket.getaddrinfo(host, None)[0]
    if world.local_size == world.size and ip_address(address[0]).is_loopback:
        return socket.create_server((host, 0), family=family, backlog=world.size)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=world.size, dualstack_ipv6=dual)


def _says_goodbye(line: socket.socket) -> bool:
    try:
        return line.recv(1) == _GOODBYE
    except OSError:
        return False


def _cut_connections() -> None:
    """Every TCP connection of this process: torch does not say which are its own."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # of one that listens, which gloo does not outlive
                    connection.shutdown(socket.SHUT_RDWR)
