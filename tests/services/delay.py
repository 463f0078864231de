"""Packets that come in late, for kernels without netem: started by network.py, not by hand.

python tests/services/delay.py PID ...

The network namespace of each process PID gets an nftables rule that queues what comes in by
Ethernet to this process (nfqueue). A packet's number is all that is told, not its content; when it
is due, one message lets all go on up to it. Each line of standard input sets the delays of all
hosts, in milliseconds; a line of output says that they are in force. It ends with its input.

The messages are those of Linux's uapi headers: netfilter/nf_tables.h, nfnetlink_queue.h and
nfnetlink.h. The rule is nftables' own spelling of `iptables -A INPUT ! -i lo -j NFQUEUE`.
"""

import ctypes
import gc
import math
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

NETFILTER, RECEIVE_BUFFER = 12, 33  # NETLINK_NETFILTER and SO_RCVBUFFORCE, unknown to Python
REQUEST, ACKNOWLEDGE, CREATE, APPEND = 0x1, 0x4, 0x400, 0x800
IPV4 = 2
BATCH_BEGIN, BATCH_END = 0x10, 0x11
TABLES, QUEUES = 10 << 8, 3 << 8  # subsystems
NEW_TABLE, DELETE_TABLE, NEW_CHAIN, NEW_RULE = TABLES + 0, TABLES + 2, TABLES + 3, TABLES + 6
PACKET, CONFIGURE, ACCEPT_UP_TO = QUEUES + 0, QUEUES + 2, QUEUES + 3
MOST_PACKETS = 2**16
ID_OFFSET = 16 + 4 + 4  # of a packet's number: after the headers of message, family, attribute


def attribute(kind: int, *values: bytes) -> bytes:
    """Several values are attributes inside this one."""
    data = b"".join(values)
    size = 4 + len(data)
    return struct.pack("=HH", size, kind) + data + bytes(-size % 4)


def nested(kind: int, *attributes: bytes) -> bytes:
    return attribute(kind | 0x8000, *attributes)


def number(value: int) -> bytes:
    return struct.pack(">I", value)


def message(kind: int, *attributes: bytes, flags: int = 0, resource: int = 0) -> bytes:
    body = struct.pack("=BBH", IPV4, 0, socket.htons(resource)) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, REQUEST | flags, 0, 0) + body


# --- the rule ---

TABLE, CHAIN = b"trainyard\0", b"input\0"


def expression(name: bytes, *attributes: bytes) -> bytes:
    return nested(1, attribute(1, name + b"\0"), nested(2, *attributes))


def adding() -> list[bytes]:
    """To queue 0 what has come in by Ethernet for this host, before it is delivered."""
    flags = ACKNOWLEDGE | CREATE
    hook = nested(4, attribute(1, number(1)), attribute(2, number(0)))  # input, at priority 0
    kind = expression(b"meta", attribute(1, number(1)), attribute(2, number(8)))  # iiftype
    ethernet = nested(3, attribute(1, struct.pack("=H", 1)))
    is_ethernet = expression(b"cmp", attribute(1, number(1)), attribute(2, number(0)), ethernet)
    to_queue = attribute(3, struct.pack("=H6x", 0))
    queue = expression(b"target", attribute(1, b"NFQUEUE\0"), attribute(2, number(0)), to_queue)
    named = attribute(1, TABLE)
    chain = (named, attribute(3, CHAIN), hook, attribute(7, b"filter\0"))
    rule = (named, attribute(2, CHAIN), nested(4, kind, is_ethernet, queue))
    return [
        message(NEW_TABLE, named, flags=flags),
        message(NEW_CHAIN, *chain, flags=flags),
        message(NEW_RULE, *rule, flags=flags | APPEND),
    ]


def removing() -> list[bytes]:
    return [message(DELETE_TABLE, attribute(1, TABLE), flags=ACKNOWLEDGE)]


def talk(netlink: socket.socket, *messages: bytes, answers: int) -> None:
    """OSError if one of them is refused."""
    netlink.send(b"".join(messages))
    for _ in range(answers):
        (error,) = struct.unpack_from("=i", netlink.recv(4096), 16)
        if error:
            raise OSError(-error, f"nfnetlink: {os.strerror(-error)}")


# --- a host's queue ---


class Queue:
    """What has come in at one host, and is not yet due."""

    def __init__(self, pid: int) -> None:
        enter(pid)
        self.netlink = netlink_socket()
        self._rules = netlink_socket()
        self._delay = 0.0
        self._waiting: deque[tuple[float, int]] = deque()  # when due, and the packet's number
        self.netlink.setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER, 2**25)
        bind = attribute(1, struct.pack(">BBH", 1, 0, IPV4))
        numbers_only = attribute(2, struct.pack(">IB", 0, 1))
        longest = attribute(3, number(MOST_PACKETS))
        whole = [attribute(4, number(4)), attribute(5, number(4))]  # 64 kB are not cut up
        for settings in ([bind], [numbers_only, longest, *whole]):
            request = message(CONFIGURE, *settings, flags=ACKNOWLEDGE)
            talk(self.netlink, request, answers=1)
        self.netlink.setblocking(False)

    def set_delay(self, seconds: float) -> None:
        change = adding() if seconds and not self._delay else []
        if self._delay and not seconds:
            self.let_go(math.inf)  # what is in the queue of a rule that is removed is lost
            change = removing()
        self._delay = seconds
        if change:
            begin, end = (message(kind, resource=10) for kind in (BATCH_BEGIN, BATCH_END))
            talk(self._rules, begin, *change, end, answers=len(change))

    def take_in(self) -> None:
        due, last = time.monotonic() + self._delay, None
        with suppress(BlockingIOError):
            while True:
                told = self.netlink.recv(64)
                if struct.unpack_from("=H", told, 4)[0] == PACKET:  # not that one has been lost
                    last = told
        if last is not None:
            self._waiting.append((due, struct.unpack_from(">I", last, ID_OFFSET)[0]))

    def let_go(self, now: float) -> float | None:
        """Those that are due; when the next one is."""
        last = None
        while self._waiting and self._waiting[0][0] <= now:
            last = self._waiting.popleft()[1]
        if last is not None:
            accept = attribute(2, number(1), number(last))
            self.netlink.send(message(ACCEPT_UP_TO, accept))
        return self._waiting[0][0] if self._waiting else None


def netlink_socket() -> socket.socket:
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER)
    netlink.bind((0, 0))
    return netlink


def enter(pid: int) -> None:
    """The network namespace of another process; os.setns is of Python 3.12."""
    with open(f"/proc/{pid}/ns/net") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")


def main(pids: Sequence[int]) -> None:
    queues = {queue.netlink: queue for queue in map(Queue, pids)}
    with suppress(PermissionError):  # a wire does not wait for the processor
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    while True:
        now = time.monotonic()
        due = [when for queue in queues.values() if (when := queue.let_go(now)) is not None]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([sys.stdin, *queues], [], [], wait)
        for netlink, queue in queues.items():
            if netlink in readable:
                queue.take_in()
        if sys.stdin in readable:
            line = sys.stdin.readline()
            if not line:
                return
            for queue, milliseconds in zip(queues.values(), line.split(), strict=True):
                queue.set_delay(float(milliseconds) / 1e3)
            print(flush=True)


if __name__ == "__main__":
    main([int(pid) for pid in sys.argv[1:]])
