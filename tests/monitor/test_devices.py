"""What a device says of itself."""

import mmap

import pynvml
import torch

from trainyard.monitor.devices import DeviceReadings, Gauge, _nvml, peak_flops

CPU = torch.device("cpu")


def test_a_cpu_has_the_memory_of_this_process() -> None:
    before = Gauge(CPU).read()
    with mmap.mmap(-1, 2**26) as kept:  # of no allocator's: it could have had it all along
        kept.write(b"1" * 2**26)
        after = Gauge(CPU).read()
    assert after.memory - before.memory > 0.9 * 2**26
    assert before == DeviceReadings(before.memory, gpu_use=None, gpu_power=None)


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(CPU, "bf16") is None


def test_without_a_driver_there_is_no_answer() -> None:
    """The library is there and says that there is no driver, or answers where there is one."""
    if torch.cuda.is_available():
        gauged = Gauge(torch.device("cuda", 0)).read()
        assert gauged.gpu_power is None or gauged.gpu_power > 0
        assert gauged.gpu_use is None or 0 <= gauged.gpu_use <= 1
    else:
        assert _nvml(pynvml.nvmlInit) is None
        assert _nvml(lambda: pynvml.nvmlDeviceGetHandleByIndex(0)) is None
