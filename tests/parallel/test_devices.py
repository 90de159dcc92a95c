"""Which device a rank takes. GPUs are pretended here: only their number matters."""

import os

import pytest
import torch
import torch.distributed as dist
from support.ranks import Crew, fork_server, held_port, tell

from cqwen_dist.config import UserError
from cqwen_dist.parallel import runtime
from cqwen_dist.parallel.runtime import distributed, pick_device


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")


def test_each_rank_takes_one_gpu_or_the_cpu_on_request(two_gpus, monkeypatch):
    assert [pick_device(i).index for i in (0, 1)] == [0, 1]
    with pytest.raises(UserError, match=r"--ranks.*rank 3.*2 GPU.*DS_ACCELERATOR=cpu"):  # NCCL would write a page
        pick_device(2)
    monkeypatch.delenv("LOCAL_RANK")
    assert pick_device(3).index == 1, "SLURM shows each task its own"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert pick_device(5).type == "cpu"


def test_the_backend_and_the_local_rank_given_to_deepspeed(two_gpus, monkeypatch):
    """DeepSpeed takes LOCAL_RANK for the number of a GPU, which must exist."""
    seen = []

    def begin(name, **options):
        seen.append((name, options["device_id"], os.environ["LOCAL_RANK"]))

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", begin)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 1, "DS_ACCELERATOR": "cuda"}.items():
        monkeypatch.setenv(name, str(value))
    with distributed() as runtime:
        assert runtime.device == torch.device("cuda", 1)
    assert seen == [("nccl", torch.device("cuda", 1), "1")]


def meet(rank, mouth, port):
    """How a rank ends that meets another one, of which only rank 1 has a GPU."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runtime.pick_device = lambda local_rank: torch.device("cuda:0" if rank == 1 else "cpu")
    torch.cuda.set_device = lambda device: None
    try:
        distributed().__enter__()
    except BaseException as error:
        tell(mouth, str(error))
    mouth.recv_bytes()  # rank 0 holds the store


def test_a_rank_without_the_gpu_that_others_have_is_refused_by_name_on_all():
    with held_port() as port:
        crew = Crew(fork_server(), meet, 2, port)
        try:
            said = dict(crew.hear(60) + crew.hear(5))
        finally:
            crew.end()
    assert said.keys() == {0, 1}
    for text in said.values():
        assert text.startswith("device: found cuda on ")
        assert "(rank 1), cpu on" in text
        assert text.endswith("(rank 0), allowed: a GPU for every rank, or DS_ACCELERATOR=cpu for all")
