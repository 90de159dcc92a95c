"""The Triton kernel: its arithmetic by Triton's CPU interpreter, itself on a GPU where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def test_the_kernel_in_tritons_interpreter():
    """In a process of its own: the interpreter must be chosen before triton is imported."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, [*HERE.parents[:2], HERE]))}
    done = subprocess.run([sys.executable, HERE / "triton_interpreted.py"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("impl", ["chunked", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("threshold", "gamma"), [(0.0, 10.0), (15.0, 1e-3), (1e4, 1e-6)])
def test_the_kernel_on_a_gpu(impl, dtype, threshold, gamma):
    sys.path.insert(0, str(HERE))
    from test_ovr import assert_as_exact_as_the_materialised, problem

    leaves, labels = problem(300, 123, 5007, gamma=gamma, threshold=threshold, dtype=dtype)
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
    assert_as_exact_as_the_materialised(leaves, labels.cuda(), impl, want_prob_sum=True)
