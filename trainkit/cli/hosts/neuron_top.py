"""What neuron-top shows of a host, without its terminal: one report of neuron-monitor, in lines.

neuron-monitor prints a JSON object a line, the first after its period of 5 s: AWS Neuron's
"Neuron Monitor User Guide".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

# it never ends by itself: 124 of timeout(1) is as it should be
MONITOR = ("timeout", "8", "neuron-monitor")
TIMED_OUT = 124
GIB = 2**30
SHOWN = 4  # cores named as the idlest


def monitor_lines(text: str) -> list[str]:
    """The newest whole report in what neuron-monitor printed; a line that says so where there is
    none."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:  # cut off when it was ended
            continue
        if isinstance(found, dict) and "neuron_runtime_data" in found:
            return _report_lines(found["neuron_runtime_data"] or [])
    return ["neuron-monitor said nothing within 8 s"]


def _report_lines(programs: Sequence[object]) -> list[str]:
    cores: dict[int, float] = {}
    errors: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for program in programs:
        counters = _part(program, "report", "neuroncore_counters", "neuroncores_in_use")
        for number, core in counters.items():
            share = _number(_part(core).get("neuroncore_utilization"))
            cores[int(number)] = cores.get(int(number), 0.0) + share
        for name, count in _part(program, "report", "execution_stats", "error_summary").items():
            errors[name] += int(_number(count))
        memory = _part(program, "report", "memory_used", "neuron_runtime_used_bytes")
        for name in ("neuron_device", "host"):
            used[name] += int(_number(memory.get(name)))
    if not programs:
        return ["no program uses its NeuronCores"]
    memory_words = (
        f"{used['neuron_device'] / GIB:,.1f} GiB on devices, {used['host'] / GIB:,.1f} on"
    )
    lines = [f"{len(programs)} programs use {len(cores)} NeuronCores: {memory_words} the host"]
    if cores:
        mean = sum(cores.values()) / len(cores)
        idle = sorted(cores, key=lambda core: (cores[core], core))[:SHOWN]
        idlest = ", ".join(f"{core}: {cores[core]:.0f} %" for core in idle)
        lines.append(f"utilization {mean:.0f} % in the mean, the lowest of cores {idlest}")
    if wrong := {name: count for name, count in sorted(errors.items()) if count}:
        said = ", ".join(f"{count} {name}" for name, count in wrong.items())
        lines.append(f"errors of executions: {said}")
    return lines


def _part(value: object, *names: str) -> Mapping[str, object]:
    """What stands under these keys; empty where anything on the way is missing."""
    for name in names:
        if not isinstance(value, Mapping):
            return {}
        value = value.get(name)
    if isinstance(value, Mapping):
        return value
    return {}


def _number(value: object) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    return 0.0
