"""What NVML, the library behind nvidia-smi, tells of this rank's GPU. Its Python package is the extra `gpu`."""

import importlib
from collections.abc import Callable

import torch

from course_lib.validate import checked

# Why a GPU is slower than it could be, where that is a fault. A power cap is none: under load a GPU is at its cap.
# Source: nvml.h, nvmlClocksEventReason*
_SLOWED_BY = {
    0x08: "slowed by its hardware (heat or power)",
    0x20: "slowed by its driver (heat)",
    0x40: "slowed by its hardware (heat)",
    0x80: "slowed by the power supply's brake",
}


def look_at_gpu(device: torch.device) -> dict | None:
    """Return what NVML says of a rank's GPU, found by its id; None for the CPU, or where there is no NVML."""
    return ask_nvml(f"GPU-{torch.cuda.get_device_properties(device).uuid}") if device.type == "cuda" else None


@checked
def ask_nvml(uuid: str) -> dict | None:
    """Return temperature, clocks, errors and what slows the GPU of that id; None where there is no NVML.

    What a GPU does not tell is None: ECC errors without ECC memory.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # the package without a driver
        return None

    def told(ask: Callable, *what: object) -> int | None:
        try:
            return ask(gpu, *what)
        except nvml.NVMLError:
            return None

    try:
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        reasons = told(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return {
            "temperature_c": told(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "clock_mhz": told(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            "most_clock_mhz": told(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            "ecc_errors": told(nvml.nvmlDeviceGetTotalEccErrors, uncorrected, nvml.NVML_VOLATILE_ECC),
            "slowed_by": [text for bit, text in _SLOWED_BY.items() if reasons & bit],
        }
    except nvml.NVMLError:  # a slice of a GPU, whose id NVML takes for none
        return None
    finally:
        nvml.nvmlShutdown()
