"""Marks of tests that run on a CUDA device, and of those that run on the CPU and on one where there is one."""

import pytest
import torch

WITHOUT_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none here")
WITHOUT_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
KINDS = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, WITHOUT_GPU])]
DEVICES = pytest.mark.parametrize("device", KINDS)
# Of `support.ranks`: ranks that share a GPU, ranks with a GPU each
_LINKS = [
    pytest.param("one gpu", marks=[pytest.mark.gpu, WITHOUT_GPU]),
    pytest.param("nccl", marks=[pytest.mark.gpus, WITHOUT_TWO]),
]
LINKS = pytest.mark.parametrize("link", _LINKS)
