"""The process that started this one: when it is killed, this one does not stay behind."""

import ctypes
import os
import signal

LAUNCHER = "TRAINYARD_LAUNCHER"
"""Tells ranks which process of ours started them."""
_OTHER_LAUNCHERS = {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK"}
_PR_SET_PDEATHSIG = 1  # see prctl(2)


def signal_without_parent(number: int) -> None:
    """Have this process get a signal when the thread that started it ends; on Linux."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with_launcher() -> None:
    """A rank of a launcher, torchrun or mpirun that is killed saves a checkpoint and ends too."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None and not os.environ.keys() & _OTHER_LAUNCHERS:
        return
    signal_without_parent(signal.SIGTERM)
    if launcher is not None and os.getppid() != int(launcher):  # it was killed before
        os.kill(os.getpid(), signal.SIGTERM)
