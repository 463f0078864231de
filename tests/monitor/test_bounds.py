"""What bounds a run, told from what was measured."""

import json

import pytest

from trainyard.monitor.bounds import Measured, as_event, judge

KNOWN = Measured(real=1000, device=2000, data=1010, data_wait=0.5)

CASES = {
    # The device waits half of the time, and the loader makes no more than what comes.
    "data": (
        KNOWN,
        "data bounds this run: 1,000 images/s come, the device could take 2,000 (2.0x); "
        "see `trainyard bench loader`",
    ),
    "data, of a loader that does not say what it can": (
        KNOWN._replace(data=None),
        "data bounds this run: 1,000 images/s come, the device could take 2,000 (2.0x); "
        "see `trainyard bench loader`",
    ),
    "data, on several ranks": (
        KNOWN._replace(ranks=8, data_wait=0.4),  # more than the 0.1 in which others are waited for
        "data bounds this run: 1,000 images/s come, the devices could take 2,000 (2.0x); "
        "see `trainyard bench loader`",
    ),
    "data, where a step cannot be tried": (
        KNOWN._replace(device=None, data_wait=0.2),
        "data bounds this run: 1,000 images/s come, and 20% of the time goes into waiting for them "
        "(1.2x); see `trainyard bench loader`",
    ),
    "device": (
        Measured(real=1900, device=2000, data=4100, data_wait=0.04),
        "the device bounds this run: 1,900 images/s, of 2,000 that it can take; the loader could "
        "make 4,100 (2.2x); more of them",
    ),
    "device, by all that it can": (
        Measured(real=2050, device=2000, data=None, data_wait=0.0),
        "the device bounds this run: 2,050 images/s, all that it can take; more of them",
    ),
    "device, though the host waits for batches, as it is ahead of a GPU": (
        Measured(real=1900, device=2000, data=8000, data_wait=0.9),
        "the device bounds this run: 1,900 images/s, of 2,000 that it can take; the loader could "
        "make 8,000 (4.2x); more of them",
    ),
    "device, as the rest is little of each": (
        Measured(real=850, device=1000, data=900, data_wait=0.07),
        "the device bounds this run: 850 images/s, of 1,000 that it can take; the loader could "
        "make 900 (1.1x); more of them",
    ),
    "device, by making batches ready there": (
        Measured(real=1000, device=2000, data=6000, data_wait=0.45),
        "the device bounds this run: 1,000 images/s of the 2,000 (2.0x) that it can take if "
        "batches are ready; 45% of the time goes into making them so (copies, augment.*), not "
        "into the loader, which could make 6,000",
    ),
    "ranks": (
        Measured(real=1900, device=3800, data=2000, data_wait=0.1, ranks=8),
        "the other ranks bound this run: 1,900 images/s, the devices could take 3,800 (2.0x) if "
        "they did not wait for each other; a larger batch.size, average.compress or gossip send "
        "less (docs/averaging.md)",
    ),
    "host": (
        Measured(real=1000, device=2000, data=3000, data_wait=0.1),
        "neither data nor device bounds this run: 1,000 images/s, the device alone could take "
        "2,000 (2.0x); does something else use the trainer's cores?",
    ),
    "device or ranks": (
        Measured(real=1000, device=None, data=3000, data_wait=0.04, ranks=4),
        "data does not bound this run: 1,000 images/s, 4% of the time goes into waiting for them; "
        "device and other ranks cannot be told apart where ranks wait for each other inside the "
        "model",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_bounds_a_run(case: str) -> None:
    found, message = CASES[case]
    judgement = judge(found, device_advice="more of them")
    assert judgement.bound == case.partition(",")[0]
    assert judgement.message == message


@pytest.mark.parametrize(
    ("found", "head_room"),
    [
        (KNOWN, 2.0),  # without the bound by data, the device's
        (KNOWN._replace(device=None, data_wait=0.2), 1.25),
        (Measured(real=1000, device=1000, data=3000, data_wait=0.0), 3.0),  # the loader's
        (Measured(real=1000, device=1000, data=None, data_wait=0.0), None),
        (Measured(real=1000, device=4000, data=3000, data_wait=0.0, ranks=2), 4.0),
    ],
)
def test_head_room(found: Measured, head_room: float | None) -> None:
    assert judge(found).head_room == pytest.approx(head_room)


@pytest.mark.parametrize("data_wait", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("device", [None, 10.0, 1000.0, 5000.0])
@pytest.mark.parametrize("data", [None, 10.0, 1000.0, 5000.0])
def test_whatever_is_measured_a_line_comes_of_it(
    device: float | None, data: float | None, data_wait: float
) -> None:
    found = Measured(real=1000, device=device, data=data, data_wait=data_wait)
    event = as_event(found, judge(found))
    assert event["message"]
    assert "\n" not in event["message"]
    json.dumps(event, allow_nan=False)


def test_the_event() -> None:
    event = as_event(KNOWN, judge(KNOWN))
    assert event.pop("message").startswith("data bounds this run")
    assert event == {
        "kind": "event",
        "event": "bounds",
        "bound": "data",
        "head_room": 2.0,
        "real": 1000,
        "device": 2000,
        "data": 1010,
        "data_wait": 0.5,
        "ranks": 1,
    }
