"""Sustained rates of a GPU and of the links between GPUs: from data sheets, or measured by `benchmarks step`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cqwen_dist.config.errors import UserError
from cqwen_dist.sizes.flops import PEAK_TFLOPS

GB, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Machine:
    """Rates of one rank. Products reach `efficiency` of the peak; other operations are bound by memory."""

    name: str
    bf16: float  # flop/s, dense peak from the data sheet
    fp32: float  # flop/s, likewise (TF32 not used)
    memory: float  # bytes/s
    inside: float  # bytes/s that a rank sends within its node
    gib: float = 80.0  # memory
    between: float = 50 * GB  # bytes/s that a rank sends to other nodes
    efficiency: float = 0.70  # fraction of the peak in large products
    calibrated: str = ""  # source of measured rates
    factors: dict[str, float] = field(default_factory=dict)  # measured / roofline seconds by part

    def peak(self, width: int) -> float:
        """Peak flop/s for numbers of `width` bytes."""
        return self.bf16 if width == 2 else self.fp32

    def factor(self, part: str) -> float:
        """Measured time of a part divided by its roofline time."""
        return self.factors.get(part, 1.0)


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h200", PEAK_TFLOPS["H200"] * TERA, 67 * TERA, 4800 * GB, 450 * GB, 139.0),
        Machine("h100", PEAK_TFLOPS["H100"] * TERA, 67 * TERA, 3350 * GB, 450 * GB),
        Machine("a100", PEAK_TFLOPS["A100"] * TERA, 19.5 * TERA, 2039 * GB, 300 * GB),
        Machine("l40s", PEAK_TFLOPS["L40S"] * TERA, 91 * TERA, 864 * GB, 32 * GB, 44.0),
        Machine("cpu", 0.1 * TERA, 0.1 * TERA, 10 * GB, 2 * GB, between=1 * GB, efficiency=1.0),
    )
}
# Bytes/s that each rank may send between nodes.
INTERCONNECTS = {"ib400": 50 * GB, "ib200": 25 * GB, "eth100": 12.5 * GB, "eth25": 3.125 * GB, "eth10": 1.25 * GB}


def machine(name: str, interconnect: str, calibration: Path | None = None) -> Machine:
    """A machine by name, with its links. calibration: output of `benchmarks step --json`, with measured factors.

    Raises `UserError`.
    """
    if name not in MACHINES:
        raise UserError("--gpu", name, f"one of {', '.join(MACHINES)}")
    if interconnect not in INTERCONNECTS:
        raise UserError("--interconnect", interconnect, f"one of {', '.join(INTERCONNECTS)}")
    found = replace(MACHINES[name], between=INTERCONNECTS[interconnect])
    if calibration is None:
        return found
    try:
        document = json.loads(calibration.read_text(encoding="utf-8"))
        factors = {str(k): float(v) for k, v in document["calibration"]["factors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError("--calibrate", str(calibration), "a document of `benchmarks step --json`") from None
    good = {part: factor for part, factor in factors.items() if 0 < factor < float("inf")}
    return replace(found, factors=good, calibrated=str(calibration))


def describe(found: Machine) -> dict[str, Any]:
    """The rates in readable units."""
    return {
        "gpu": found.name,
        "bf16_tflops": found.bf16 / TERA,
        "memory_gb_per_s": found.memory / GB,
        "inside_gb_per_s": found.inside / GB,
        "between_gb_per_s": found.between / GB,
        "efficiency": found.efficiency,
        "calibrated": found.calibrated or None,
    }
