"""How the ranks of a run find each other, and hear when one is lost."""

from trainyard.rendezvous.discovery import discover
from trainyard.rendezvous.membership import member
from trainyard.rendezvous.place import Place
from trainyard.rendezvous.pulse import Pulse
from trainyard.rendezvous.watch import Watch

__all__ = ["Place", "Pulse", "Watch", "discover", "member"]
