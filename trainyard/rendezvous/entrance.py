"""Where the first rank lets the others in, each over a line of its own that stays open."""

import errno
import secrets
import selectors
import socket
from typing import Any

from trainyard.errors import InputError
from trainyard.rendezvous.lines import Line
from trainyard.rendezvous.place import Place


class Entrance:
    """Who says the number that the first rank has posted comes in; others have no business here."""

    def __init__(self, server: socket.socket, size: int) -> None:
        self.number = secrets.token_hex(16)
        self.port: int = server.getsockname()[1]
        self.missing = set(range(1, size))
        self.lines: dict[int, Line] = {}
        self.differences: dict[int, list[str]] = {}
        """In what those differ who do not run what the first rank runs."""
        self.gone: list[Line] = []
        """Who has come in, and ended since."""
        self._server = server
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ, None)

    def look(self, seconds: float) -> None:
        """Attend to whatever happens within so many seconds, for the first time."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            else:
                self._hear(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return  # it has gone away again
            raise InputError(
                f"rank 0 cannot take another connection ({error.strerror}): with so many ranks it "
                "needs a higher limit of open files (ulimit -n)"
            ) from None
        guest = Line(connection)
        self._selector.register(guest, selectors.EVENT_READ, guest)

    def _hear(self, guest: Line) -> None:
        try:
            messages = guest.receive()
        except ValueError:  # not one of us
            messages = None
        if messages is None:
            self._dismiss(guest)
            if guest.rank >= 0:
                self.gone.append(guest)
        elif messages and guest.rank < 0:
            self._greet(guest, messages[0])

    def _greet(self, guest: Line, message: Any) -> None:
        match message:
            case {"number": self.number, "rank": int(rank), "place": place, "differs": differs}:
                pass
            case _:
                self._dismiss(guest)
                return
        if rank in self.lines:
            guest.send({"refused": f"{self.lines[rank]} is there already"})
            self._dismiss(guest)
            return
        guest.rank, guest.place = rank, Place(*place)
        guest.send({"welcome": rank})
        self.lines[rank] = guest
        self.missing.discard(rank)
        if differs:
            self.differences[rank] = differs

    def _dismiss(self, guest: Line) -> None:
        self._selector.unregister(guest)
        guest.close()

    def close(self) -> None:
        """The lines stay open."""
        inside = {line.fileno() for line in self.lines.values()}
        for key in list(self._selector.get_map().values()):
            if key.fd not in inside:
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
