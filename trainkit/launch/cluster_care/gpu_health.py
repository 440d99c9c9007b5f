"""What NVIDIA's own tool says of the health of a host's GPUs: memory errors, and clocks that the
hardware slows down.

`nvidia-smi -q -x` is read by what the names of its elements end in: they have kept that over
drivers (clocks_throttle_reasons became clocks_event_reasons), while a single field of
--query-gpu that a driver does not know makes it say nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from trainkit.launch.cluster_care.remote_commands import CommandResult

LOOK = ("nvidia-smi", "-q", "-x")
LOOK_SECONDS = 60.0  # where drivers are not kept loaded it takes seconds a GPU
NO_DEVICES = "No devices were found"  # of a step of Slurm's that has none
SLOWED = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "too hot: hardware slowdown",
    "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "too hot: driver's slowdown",
}


@dataclass(frozen=True)
class GpuSymptom:
    """One thing to know about a GPU.

    Args:
        message: what was seen.
        advice: the way out.
        wrong: it will break runs, or make them slow.
    """

    message: str
    advice: str
    wrong: bool = True


def gpu_symptoms(said: CommandResult) -> list[GpuSymptom]:
    """What is wrong with the GPUs of a host that has said this; nothing where it has no such
    tool."""
    # no such program, or no GPU to be seen: how many there are is another question
    if said.error is not None or NO_DEVICES in said.out:
        return []
    advice = "`nvidia-smi` and `dmesg | grep -i xid` there"
    if said.code:
        return [GpuSymptom(f"nvidia-smi ends with {said.code}: {said.last}", advice)]
    try:
        log = ElementTree.fromstring(said.out)
    except ElementTree.ParseError as error:
        return [GpuSymptom(f"nvidia-smi -q -x prints no XML: {error}", advice, wrong=False)]
    return [
        symptom for number, gpu in enumerate(log.iter("gpu")) for symptom in _of_gpu(number, gpu)
    ]


def _of_gpu(number: int, gpu: ElementTree.Element) -> Iterator[GpuSymptom]:
    name = f"GPU {number} ({gpu.get('id', '?')})"
    reset = f"`nvidia-smi -r -i {number}` when it is idle, or a reboot"
    if errors := sum(_uncorrectable(volatile) for volatile in gpu.iter("volatile")):
        words = (
            f"{name}: {errors} uncorrectable memory error{'s' if errors > 1 else ''} since its"
            " driver was loaded"
        )
        yield GpuSymptom(
            words,
            f"{reset}; where they come again leave the host out (--exclude) and have the GPU"
            " replaced",
        )
    flags = {
        element.tag for element in gpu.iter() if (element.text or "").strip() in ("Yes", "Active")
    }
    if "remapped_row_failure" in flags:
        yield GpuSymptom(
            f"{name}: a broken row of its memory could not be remapped",
            "leave the host out (--exclude) and have the GPU replaced",
        )
    if flags & {"remapped_row_pending", "pending_retirement", "pending_blacklist"}:
        yield GpuSymptom(f"{name}: broken memory waits to be taken out of use", reset, wrong=False)
    if slowed := [
        words for end, words in SLOWED.items() if any(flag.endswith(f"_{end}") for flag in flags)
    ]:
        advice = (
            "temperature, fans, power supply and power cap of the host: the slowest GPU is"
            " everybody's speed"
        )
        yield GpuSymptom(f"{name}: its clocks are slowed down ({', '.join(slowed)})", advice)


def _uncorrectable(volatile: ElementTree.Element) -> int:
    """Errors since the driver was loaded: by kind of memory, or on GPUs before Ampere the total
    of double-bit ones."""
    old = [element.find("total") for element in volatile.iter("double_bit")]
    new = [element for element in volatile.iter() if "uncorrectable" in element.tag]
    return sum(
        int(text)
        for element in (*old, *new)
        if element is not None and (text := (element.text or "").strip()).isdigit()
    )
