"""A further group of the features needs one entry: config/trainable.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import command_environment, write_config

# The base's norms as a group, in a process of its own: the schema reads the groups once, as it is imported
CODE = """
import json, sys
from pathlib import Path
from cqwen_dist.config import trainable

def norms(config, base):
    return sum(count * sum(block.norms for block in layer) for count, layer in base.stack) * base.hidden

trainable.FEATURE_GROUPS["norms"] = trainable.FeatureGroup(r"layers\\..*layernorm\\.weight$", "norms", norms)
trainable.GROUPS += ("norms",)

import torch
from cqwen_dist import api
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import load_config
from cqwen_dist.sizes.architecture import read_architecture
from cqwen_dist.tools.export.export import export
from cqwen_dist.tools.plan.make import plan

path, folder = sys.argv[1], Path(sys.argv[2])
api.train(path, overrides={"run.stop_after": "norms"})
half = api.train(path)
config = load_config(path)
model, _ = load_trained(half.folder)
name = "backbone.transformer.layers.0.input_layernorm.weight"
trained = dict(model.model.features.named_parameters())[name]
written = export(half.folder, folder)
again, _ = load_trained(folder)
planned = plan(config, nodes=1, gpus_per_node=0, architecture=read_architecture(config))
saved = sum(file.stat().st_size for file in half.checkpoint.glob("*.safetensors"))
print(json.dumps({
    "step": half.step,
    "moved": float((trained - 1).abs().max()),
    "exported": bool(torch.equal(dict(again.model.features.named_parameters())[name], trained)),
    "planned": [part.bytes for part in planned.parts if part.name == "norms: optimizer"],
    "bytes": saved - planned.checkpoint_bytes,
    "evaluated": [found["eval/cls_loss_mean"] for found in (api.evaluate(half), half.metrics)],
}))
"""


@pytest.mark.slow
def test_a_group_of_one_entry_trains_resumes_evaluates_exports_and_is_planned(tmp_path: Path) -> None:
    stages = [
        {"name": name, "train": ["heads", "embedding", "norms"], "steps": 2, "lr": 1e-2} for name in ("norms", "on")
    ]
    config = write_config(tmp_path, stages=stages)
    command = [sys.executable, "-c", CODE, str(config), str(tmp_path / "exported")]
    done = subprocess.run(command, capture_output=True, text=True, env=command_environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["moved"] > 0.005
    assert found == {**found, "step": 4, "exported": True}
    evaluated, in_training = found["evaluated"]
    assert evaluated == pytest.approx(in_training, rel=1e-5), "other batches, so other roundings"
    assert found["planned"] == [4 * 16 * (4 + 8)], "4 norms of H = 16: fp32 masters and two moments"
    assert 0 <= found["bytes"] < 30_000, "the files of a checkpoint are what is planned, and their headers"
