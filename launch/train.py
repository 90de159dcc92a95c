"""Training from a script: deepspeed --num_accelerators 2 launch/train.py run.yaml [key=value ...]

`torchrun`, `accelerate launch` and `srun` start it too. docs/python.md has rows from memory, callbacks and results.
"""

import sys

from cqwen_dist import train
from cqwen_dist.config import load_config

if __name__ == "__main__":
    config, *changes = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # DeepSpeed adds it
    result = train(load_config(config, changes))
    if result.rank == 0:
        print(result.status, result.step, result.checkpoint, result.metrics)
