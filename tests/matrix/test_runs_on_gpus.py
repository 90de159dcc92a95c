"""Whole runs of two ranks on GPUs have the losses and the weights of one rank: on one GPU for both, and over NCCL.

On one GPU collectives go by way of the host (`support.staged`): torch's gloo can all-reduce and broadcast what lies on
a GPU, and neither gather nor scatter it. Streams, events, kernels and DeepSpeed's engine are those of a GPU. Over NCCL
each rank has a GPU of its own; what that alone can break is listed in docs/gpu.md.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.devices import LINKS
from support.ranks import Pool
from support.runs import losses, metrics, set_back, train_run, write_config
from torch import Tensor

from cqwen_dist.checkpoint.manifest import checkpoint_folder

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}  # relative
LAYOUTS = {
    f"ZeRO {zero}, groups of {group}": (f"parallel.zero_stage={zero}", f"parallel.vocab_group_size={group}")
    for zero, group in product((1, 2, 3), (1, 2))
} | {"a text over both": ("parallel.zero_stage=2", "parallel.sequence_group_size=2")}
# On a GPU's stand-in, where a run takes 20 seconds of a core; on a GPU all of them
QUICK = [*product(["ZeRO 1, groups of 2", "ZeRO 3, groups of 2"], TOLERANCE), ("a text over both", "bf16")]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=", ".join(case))
    for case in product(LAYOUTS, TOLERANCE)
]
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """train(link, precision, world, *overrides): the folder of a run, 3 steps of heads and 3 with LoRA, 12 texts each.

    A run that is there and done stays as it is; one that is not done goes on.
    """
    config = write_config(tmp_path_factory.mktemp("runs"), stages__0__lr=1e-3, stages__1__lr=1e-3)

    def run(link: str, precision: str, world: int, *overrides: str, name: str = "run") -> Path:
        folder = config.parent / "-".join((name, link, precision, str(world), *overrides))
        given = f"run.dir={folder}", f"train.precision={precision}", f"train.micro_batch_size={12 // world}"
        if not folder.is_dir() or "-00000006" not in (folder / "latest").read_text():
            train_run(config, *given, *overrides, world=world, ranks=pool, link=link)
        return folder

    return run


def weights_of(run: Path) -> dict[str, Tensor]:
    """All that the last checkpoint has of the model, in fp32 [n]; the rows of a vocabulary group put together."""
    found: dict[str, list[Tensor]] = {}
    for file in sorted(checkpoint_folder(run, 6).rglob("*.safetensors")):
        if ".moments." not in file.name:
            for name, tensor in load_file(file).items():
                found.setdefault(name, []).append(tensor.float().flatten())
    return {name: torch.cat(parts) for name, parts in found.items()}


def hold(run: Path, alone: Path, precision: str) -> None:
    """Hold a run's losses and last weights to those of one rank.

    In fp32 each tensor by its norm. In bf16 all together: in a tensor that begins at 0, rounding decides the sign of
    small gradients, and Adam moves by the sign.
    """
    limit = TOLERANCE[precision]
    assert [record["step"] for record in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert losses(run) == pytest.approx(losses(alone), rel=limit)
    ours, theirs = weights_of(run), weights_of(alone)
    assert ours.keys() == theirs.keys()
    if precision == "bf16":
        ours, theirs = ({"all": torch.cat([each[name] for name in theirs])} for each in (ours, theirs))
    far = {name: float((ours[name] - one).norm() / one.norm()) for name, one in theirs.items()}
    worst = max(far, key=lambda name: far[name])
    print(f"{run.name}: weights {far[worst]:.1e} ({worst})")
    assert far[worst] <= limit, worst


@LINKS
@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_two_ranks_train_as_one(train: Train, layout: str, precision: str, link: str) -> None:
    hold(train(link, precision, 2, *LAYOUTS[layout]), train(link, precision, 1), precision)


@LINKS
def test_a_run_that_goes_on_from_a_checkpoint_trains_as_one_rank(train: Train, link: str) -> None:
    layout = LAYOUTS["ZeRO 3, groups of 2"]
    run = train(link, "fp32", 2, *layout)
    again = run.with_name(run.name.replace("run", "again", 1))
    set_back(run, again, 4)
    assert train(link, "fp32", 2, *layout, name="again") == again
    hold(again, train(link, "fp32", 1), "fp32")
