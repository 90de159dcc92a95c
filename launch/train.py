"""Training from a script: deepspeed --num_accelerators 2 launch/train.py run.yaml [key=value ...]

`torchrun`, `accelerate launch` and `srun` start it too. docs/python.md has rows from memory, callbacks and results.
"""

import sys

import yaml

from cqwen_dist import train

if __name__ == "__main__":
    config, *changes = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # DeepSpeed adds it
    overrides = {key: yaml.safe_load(value) for key, _, value in (change.partition("=") for change in changes)}
    result = train(config, overrides=overrides)
    if result.rank == 0:
        print(result.status, result.step, result.checkpoint, result.metrics)
