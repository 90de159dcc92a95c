"""The fused kernel compiled ahead of time, as ptxas reports it: no GPU is needed, and none of its cuts may spill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "fused_compiled.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        (90, "sm_90"),
        (90, "sm_90 fp8"),
        (90, "sm_90 two"),
        (90, "sm_90 two fp8"),
        (80, "sm_80"),
    ],
)
def test_no_tile_shape_spills_registers(arch: int, name: str) -> None:
    """In a process of its own: another test may have asked for the interpreter."""
    pytest.importorskip("triton")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, PROGRAM, str(arch), name], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = dict(item.split("=") for item in done.stdout.split())
    assert int(found["stack"]) == 0, f"{name}: {done.stdout}"
    programs = int(found["programs"])
    assert int(found["registers"]) * 32 * int(found["warps"]) * programs <= 65_536
    assert (int(found["shared"]) + 1024) * programs <= {80: 164, 90: 228}[arch] << 10
