"""What goes with what (docs/capabilities.md): allowed pairs of options train two steps, refused ones name their key."""

import math
import traceback
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.capability_table import OPTIONS, keys_of, pairs, refusal
from support.ranks import run_ranks
from support.runs import VOCAB, as_rank, losses, qwen2_sizes, write_config, write_texts
from support.tiny import tiny_sizes
from torch import nn

from cqwen_dist.config.architectures import ARCHITECTURES
from cqwen_dist.config.reading import given_config

OF_TWO = ("parallel.vocab_group_size: 2", "parallel.sequence_group_size: 2")  # options that need two ranks
LACKED = (  # options that an architecture may not support
    *("parallel.zero_stage: 3", "parallel.sequence_group_size: 2", "model.attention: varlen", "data.pack: true"),
    "model.gradient_checkpointing: true",
)
SIZES = qwen2_sizes(VOCAB, 64, 64, 2, 2, max_position_embeddings=64, initializer_range=0.2)
ALLOWED = [pair for pair in pairs() if refusal(pair) is None]


def test_one_key_is_enough() -> None:
    assert {option: str(error) for option in OPTIONS if (error := refusal((option,)))} == {}


@pytest.mark.parametrize("pair", [pair for pair in pairs() if pair not in ALLOWED], ids=" + ".join)
def test_a_refused_pair_names_one_of_its_keys_with_the_value(pair: tuple[str, str]) -> None:
    error, keys = refusal(pair), keys_of(*pair)
    assert error is not None
    assert error.found == keys[error.key]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_an_architecture_refuses_names_the_option_and_the_architecture(kind: str) -> None:
    refused = {option: error for option in OPTIONS if (error := refusal((option,), kind))}
    for option, error in refused.items():
        assert {error.key: error.found} == keys_of(option)
        assert kind in str(error.allowed)


def _train_all(config: Path, cases: list[tuple[str, tuple[str, ...]]]) -> dict[str, str]:
    """What failed, by case: its traceback, or the losses that are not finite. A single option's run is exported too."""
    from cqwen_dist.tools.export.export import export
    from cqwen_dist.training.train import train_on

    failed = {}
    compiled = nn.Module.compile
    with pytest.MonkeyPatch.context() as patch:  # the compiler itself would take minutes
        patch.setattr(nn.Module, "compile", lambda module, **given: compiled(module, **{"backend": "eager", **given}))
        for number, (kind, options) in enumerate(cases):
            run, name = config.parent / f"run{number}", f"{kind}: {' + '.join(options)}"
            sizes = SIZES if kind == "qwen2" else {**tiny_sizes(kind), "vocab_size": VOCAB}
            given = {"run.dir": str(run), "model.architecture": sizes, **keys_of(*options)}
            try:
                train_on(given_config(config, given), as_rank())
                if kind == "qwen2" and len(options) == 1 and as_rank().is_main:
                    for how in ({}, {"merge": True}):
                        export(run, config.parent / f"out{number}{[*how]}", **how)
            except Exception:
                failed[name] = traceback.format_exc()
            else:
                found = losses(run)
                if len(found) != 2 or not all(map(math.isfinite, found)):
                    failed[name] = f"losses {found}"
    return failed


@pytest.mark.slow
@pytest.mark.parametrize(("world", "half"), [(1, 0), (1, 1), (2, None)])
def test_every_allowed_pair_trains_two_steps(tmp_path: Path, world: int, half: int | None) -> None:
    """On every other architecture each option that one may lack. In halves, for two processes."""
    cases = [("qwen2", (option,)) for option in OPTIONS] + [("qwen2", pair) for pair in ALLOWED]
    others = [(kind, (option,)) for kind in ARCHITECTURES for option in LACKED if kind != "qwen2"]
    cases += [case for case in others if refusal(case[1], case[0]) is None]
    cases = [case for case in cases if bool({*case[1]} & {*OF_TWO}) == (world == 2)]
    cases = cases if half is None else cases[half::2]
    if find_spec("bitsandbytes") is None:
        cases = [case for case in cases if "model.quantize" not in keys_of(*case[1])]
    write_texts(tmp_path / "texts.jsonl", 24)
    config = write_config(
        tmp_path,
        data__eval_fraction=0.0,
        stages=[{"name": "all", "train": ["heads", "embedding", "lora"], "steps": 2, "lr": 1e-3}],
        train__checkpoint_every=100,
    )
    (failed, *_) = run_ranks(_train_all, world, config, cases, timeout=850)
    assert not failed, "\n\n".join(f"{case}: {said}" for case, said in failed.items())
