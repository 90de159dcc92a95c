"""Both products with W_cls in one pass: as exact as two plain products, as one operation, and by the Triton kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from both_products_interpreted import SHAPES, assert_exact, problem

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import both_products
from cqwen_dist.ops.ovr.both_products import both_by_blocks, both_by_triton, word_scores

HERE = Path(__file__).parent


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_blocked_products_are_as_exact_as_plain_ones(shape, dtype, monkeypatch) -> None:
    monkeypatch.setattr(both_products, "BLOCK_BYTES", 64 * 37 * 4)
    u, weight = problem(*shape, dtype)
    assert_exact(both_by_blocks(*u, weight), u, weight)
    scores = word_scores(u, weight)
    assert torch.equal(torch.stack(scores), both_by_blocks(*u, weight))
    rounded = u.to(torch.bfloat16)
    assert_exact(torch.stack(word_scores(rounded, weight)), rounded, weight)
    exact = word_scores(Cauchy(*(part.double() for part in u)), weight.double())
    assert exact.loc.dtype == torch.float64
    torch.testing.assert_close(exact.scale, u.scale.double() @ weight.double().abs().T, rtol=1e-12, atol=1e-12)


def test_torch_compile_sees_one_custom_operation() -> None:
    u, weight = problem(3, 37, 70, torch.float32)
    torch.library.opcheck(both_products._BOTH_PRODUCTS, (*u, weight))
    torch.library.opcheck(both_products._BOTH_PRODUCTS, tuple(each.bfloat16() for each in (*u, weight)))
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(word_scores, fullgraph=True, backend=backend)
    assert torch.equal(torch.stack(compiled(u, weight)), both_by_blocks(*u, weight))
    assert sum("both_products" in name for name in seen) == 1
    assert not any("matmul" in name or "abs" in name for name in seen)


def test_the_kernel_in_tritons_interpreter() -> None:
    """In a process of its own: the interpreter must be chosen before triton is imported."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    done = subprocess.run(
        [sys.executable, HERE / "both_products_interpreted.py"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("dtype", ["*fp32", "*bf16"])
def test_the_kernel_compiles_for_a_gpu(dtype: str) -> None:
    """Without one: Triton's own compiler down to PTX; with several tokens it uses tensor cores."""
    compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    pointers = {"loc_ptr": dtype, "scale_ptr": dtype, "out_ptr": "*fp32"}
    for tokens, words, width, warps in both_products.TILES[2 if dtype == "*bf16" else 4].values():
        shape = {"N": tokens, "C": 896, "BM": tokens, "BN": words, "BK": width}
        signature = {**pointers, "weight_ptr": "*bf16", "stride": "i32", "rows": "i32"} | dict.fromkeys(
            shape, "constexpr"
        )
        source = compiler.ASTSource(both_products._kernel(), signature, constexprs=shape)
        made = compiler.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        assert ("mma" in made.asm["ptx"]) == (tokens > 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_products_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    u, weight = problem(*shape, dtype)
    at = Cauchy(*(part.cuda() for part in u))
    for make in (both_by_triton, both_by_blocks):
        assert_exact(make(*at, weight.cuda()).cpu(), u, weight, 2.0**-19)  # three tf32 hold 21 bits, truncated
        if dtype == torch.bfloat16:
            rounded = u.to(torch.bfloat16)
            assert_exact(make(*at.to(dtype), weight.cuda()).cpu(), rounded, weight, 2.0**-19)
