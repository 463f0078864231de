"""The ranks of a run: launcher variables, startup check, process group, watchdog."""

from trainyard.distributed.heartbeat import Heartbeat
from trainyard.distributed.launcher_variables import discover, discover_or_alone
from trainyard.distributed.process_group import init_distributed
from trainyard.distributed.watchdog import Watchdog

__all__ = ["Heartbeat", "Watchdog", "discover", "discover_or_alone", "init_distributed"]
