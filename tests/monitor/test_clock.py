"""Where the time of a run goes, over all its restarts."""

import pytest

from trainyard.monitor.clock import Clock


def test_phases_add_up(now: list[float]) -> None:
    clock = Clock()
    for seconds in (1.0, 2.0):
        with clock.phase("data"):
            now[0] += seconds
        now[0] += 10
    with clock.phase("save"):
        now[0] += 4
    assert clock.seconds("data") == 3
    assert clock.seconds("save") == 4
    assert clock.seconds("eval") == 0
    assert clock.total == 27


def test_a_phase_that_fails_is_counted(now: list[float]) -> None:
    clock = Clock()
    with pytest.raises(ValueError), clock.phase("data"):
        now[0] += 1
        raise ValueError
    assert clock.seconds("data") == 1


def test_a_restart_goes_on_where_the_checkpoint_was(now: list[float]) -> None:
    clock = Clock()
    with clock.phase("data"):
        now[0] += 5
    now[0] += 5
    saved = clock.state_dict()
    now[0] += 1000  # lost: after the checkpoint, and until the restart
    restarted = Clock()
    now[0] += 3  # until the checkpoint is loaded
    restarted.load_state_dict(saved)
    now[0] += 2
    with restarted.phase("data"):
        now[0] += 1
    assert restarted.total == 13
    assert restarted.seconds("data") == 6
    assert restarted.seconds("eval") == 0


def test_what_is_no_training(now: list[float]) -> None:
    clock = Clock()
    now[0] += 1
    for phase in ("data", "eval", "save"):
        with clock.phase(phase):
            now[0] += 10
    assert clock.training == 11
