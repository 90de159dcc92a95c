"""Times a step that learns numbers only in turns with the same step that learns words too, and with Hugging Face + PEFT
with transformers' scalar head."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.peer import peer_step
from benchmarks.rig import build_rig
from benchmarks.timing import in_turn, seconds_of, spread
from cqwen_dist.config import Config, given_config
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.sizes.architecture import Architecture
from cqwen_dist.tools.plan.stage_sizes import flops, stage_sizes

NUMBERS, WORDS, SCALAR = "numbers only", "with words", "hf+peft, scalar head"
WARM_UP = 2  # steps


def numbers_rows(config: Config, architecture: dict[str, Any], runtime: Runtime, rounds: int) -> list[dict[str, Any]]:
    """A row of `bench.step` for each of the three, in the config's last stage. config: with `loss.words: none`."""
    device, steps, work = runtime.device, dict[str, Callable[[], object]](), dict[str, float]()
    for name, own in {NUMBERS: config, WORDS: given_config(config, {"loss.words": "ovr+softmax"})}.items():
        rig = build_rig(own, architecture, runtime)
        plan = rig.enter(-1)
        batches = rig.batches(plan)
        steps[name] = partial(rig.step, batches, plan)
        sizes = stage_sizes(own, Architecture.of(architecture), world=1, kind=device.type)[-1]
        work[name] = flops(sizes).useful
    steps[SCALAR], work[SCALAR] = partial(peer_step(config, architecture, device), batches), flops(sizes).backbone
    in_turn(steps, WARM_UP)
    times = in_turn({name: partial(seconds_of, step, device) for name, step in steps.items()}, rounds)
    rows = []
    for name, found in times.items():
        rate = sizes.step_tokens / statistics.median(found)
        row = {"name": f"in turns: {name}", "step_s": spread(found), "tokens_per_s": rate, "mfu": None, "trainable": []}
        if name != NUMBERS:
            pairs = [other / own for other, own in zip(found, times[NUMBERS], strict=True)]
            row["ratio"] = {
                "against": f"{NUMBERS} over it, tokens/s",
                "measured": statistics.median(pairs),
                "by_operations": work[name] / work[NUMBERS],
            }
        rows.append(row)
    return rows
