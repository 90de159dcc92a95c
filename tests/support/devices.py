"""Marks of tests that run on a CUDA device, and of those that run on the CPU and on one where there is one."""

import pytest
import torch

WITHOUT_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none here")
KINDS = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, WITHOUT_GPU])]
DEVICES = pytest.mark.parametrize("device", KINDS)
