"""Which device a rank takes. GPUs are pretended here: only their number matters."""

import pytest
import torch

from cqwen_dist.config import UserError
from cqwen_dist.parallel.runtime import pick_device


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")


def test_one_gpu_a_rank(two_gpus):
    assert [pick_device(i).index for i in (0, 1)] == [0, 1]


def test_more_ranks_than_gpus_are_refused(two_gpus):
    """NCCL would say "Duplicate GPU detected" in a page of its own log."""
    with pytest.raises(UserError, match=r"--ranks.*rank 3.*2 GPU.*DS_ACCELERATOR=cpu"):
        pick_device(2)


def test_the_cpu_on_request(two_gpus, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert pick_device(5).type == "cpu"


def test_slurm_shows_each_task_its_own(two_gpus, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK")
    assert pick_device(3).index == 1
