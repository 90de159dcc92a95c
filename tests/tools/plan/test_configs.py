"""The configs of the public sizes: each is headed by what the plan says of it, made again here and compared.

`python tests/tools/plan/test_configs.py` writes the heads anew.
"""

from pathlib import Path

import pytest

from cqwen_dist.config import load_config
from cqwen_dist.config.trainable import dense_rate
from cqwen_dist.sizes.architecture import read_architecture
from cqwen_dist.tools.plan.cost import machine
from cqwen_dist.tools.plan.make import Plan, plan
from cqwen_dist.tools.plan.memory import GIB

CONFIGS = Path(__file__).parents[3] / "configs"
# file: nodes, GPUs on each, GiB of one, its kind
CLUSTERS = {
    "qwen2.5-0.5b.yaml": (1, 1, 80, "h100"),
    "qwen2.5-7b.yaml": (1, 8, 80, "h100"),
    "qwen2.5-14b.yaml": (4, 8, 80, "h100"),
    "qwen2.5-32b.yaml": (4, 8, 80, "h100"),
    "qwen2.5-72b.yaml": (8, 8, 80, "h100"),
}


def head_lines(found: Plan, command: str) -> list[str]:
    """The lines above a config: command, memory, time."""
    lines = [command, f"{found.reason} ({found.stage}: {found.moment})"]
    for stage in found.stages:
        lines.append(
            f"{stage.stage}: {stage.seconds:.3g} s a step of {stage.tokens:,} tokens, "
            f"{stage.tokens_per_s:,.0f} tokens/s, {stage.mfu:.0%} MFU, bound by {stage.bound}"
        )
    if found.hours is not None and found.gpu_hours is not None:
        lines.append(f"{found.hours:.1f} hours, {found.gpu_hours:.3g} GPU-hours at the stated rates")
    lines.append(f"checkpoint {found.checkpoint_bytes / GIB:.1f} GiB")
    return lines


def head_of(name: str) -> list[str]:
    nodes, gpus, gib, gpu = CLUSTERS[name]
    config = load_config(CONFIGS / name)
    found = plan(
        config,
        nodes=nodes,
        gpus_per_node=gpus,
        gpu_memory_gib=gib,
        architecture=read_architecture(config),
        machine=machine(gpu, "ib400"),
    )
    assert found.fits, f"{name}: {found.reason}"
    command = f"cqwen plan configs/{name} --nodes {nodes} --gpus-per-node {gpus} --gpu-memory-gib {gib} --gpu {gpu}"
    return [f"# {line}" for line in head_lines(found, command)]


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_rate_suits_the_base(name: str) -> None:
    config = load_config(CONFIGS / name)
    rate = dense_rate(read_architecture(config)["hidden_size"])
    assert [f"{stage.lr:.1e}" for stage in config.stages] == [f"{rate:.1e}"] * 2


@pytest.mark.parametrize("name", CLUSTERS)
def test_head_of_each_config_equals_the_plan(name):
    lines = (CONFIGS / name).read_text(encoding="utf-8").splitlines()
    head = head_of(name)
    assert lines[: len(head)] == head, "python tests/tools/plan/test_configs.py writes the heads anew"


if __name__ == "__main__":
    for name in CLUSTERS:
        file = CONFIGS / name
        body = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        file.write_text("\n".join([*head_of(name), *body]) + "\n", encoding="utf-8")
