"""Compile the fused kernel for a GPU that is not here: ARCH and a name of `SHAPES`. Prints what ptxas says."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cqwen_dist.ops.ovr.fused import GROUP, SHAPES, _fused_kernel


def compiled(arch: int, name: str) -> triton.compiler.CompiledKernel:
    """The kernel with gradients, sums of P and a limited slope, in bf16 or fp8, by TMA on sm_90."""
    shape, fp8, tma = SHAPES[name], name.endswith("fp8"), arch >= 90
    narrow = "fp8e4nv" if fp8 else "bf16"
    slice_words = shape.bn // shape.parts
    operands = {
        "x": ("bf16", shape.bm, shape.bk),
        "g": (narrow, shape.bm, shape.bk),
        "w": ("bf16", shape.bn, shape.bk),
        "abs_w": (narrow, shape.bn, shape.bk),
        "d_loc": ("bf16", shape.bm, slice_words),
        "d_scale": ("bf16", shape.bm, slice_words),
    }
    constants = {
        "WITH_GRAD": True,
        "FACTORS": fp8,
        "HAS_CLASS_WEIGHTS": True,
        "WANT_PROB_SUM": True,
        "WANT_GAP": True,
        "SLOPE_LIMIT": 1.0,
        "SKIP_LABELS": False,
        "TMA": tma,
        "BM": shape.bm,
        "BN": shape.bn,
        "BK": shape.bk,
        "PARTS": shape.parts,
        "GROUP": GROUP,
    }
    signature = {}
    for argument in _fused_kernel.arg_names:
        if argument in operands:
            dtype, rows, columns = operands[argument]
            signature[argument] = f"tensordesc<{dtype}[{rows},{columns}]>" if tma else f"*{dtype}"
        elif argument in constants:
            signature[argument] = "constexpr"
        else:
            pointer = "*i64" if argument == "target_ptr" else "*fp32"
            signature[argument] = pointer if argument.endswith("_ptr") else "i32"
    names = list(signature)
    sixteen = [i for i, each in enumerate(names) if signature[each][0] == "*" or each in ("C", "stride")]
    source = ASTSource(
        _fused_kernel,
        signature,
        {(names.index(each),): value for each, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in sixteen},
    )
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


if __name__ == "__main__":
    kernel, shape = compiled(int(sys.argv[1]), sys.argv[2]), SHAPES[sys.argv[2]]
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    print(f"registers={registers} stack={stack} shared={kernel.metadata.shared}", end=" ")
    print(f"warps={shape.warps} programs={shape.programs}")
