"""What a saved model answers, as plain data: by the package's classes, or by the folder's own code.

As a script: OUT FOLDER... asks each folder's own code where `cqwen_dist` cannot be imported, and saves the answers.
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import parse
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

PROMPTS = ["tea costs 3.5 and milk costs", "he paid 1,234.50"]
MODES = ("standard", "causal", "compatible", "ovr", "individual", "noise", "sample")
LEVELS = (0.5, 0.9, 0.95)


def answers(folder: Path, **trust: bool) -> dict[str, Any]:
    """Name -> ids, tensors and texts: of a forward pass, every mode of `generate`, the pipeline."""
    model = AutoModelForCausalLM.from_pretrained(folder, **trust)
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        laws = model(**batch, output_scales=True, output_log_probs=True)
    found: dict[str, Any] = {"batch": dict(batch), "laws": {k: v for k, v in laws.items() if torch.is_tensor(v)}}
    for mode in MODES:
        options = {"max_new_tokens": 9, "seed": 3, "digits": "auto", "return_numbers": True}
        ids, numbers = model.generate(**batch, mode=mode, **options)
        found[mode] = {
            "ids": ids,
            "values": numbers.values,
            "texts": tokenizer.batch_decode(ids, numbers.values),
            "unvalued": tokenizer.batch_decode(ids),
            "records": [str(record) for row in range(len(ids)) for record in numbers.records(row)],
            "spans": [end.nan_to_num() for level in LEVELS for end in numbers.interval(level)],
        }
    static = model.generate(**batch, max_new_tokens=9, digits="auto", cache_implementation="static")
    return {**found, "static": static, "pipeline": piped(folder, **trust)}


def learnt(folder: Path, **trust: bool) -> dict[str, torch.Tensor]:
    """The loss of a training batch, and its gradient for every parameter."""
    model = AutoModelForCausalLM.from_pretrained(folder, **trust)
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    loss = model(**batch, labels=batch["input_ids"], num_items_in_batch=40).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def piped(folder: Path, objects: bool = False, **trust: bool) -> str:
    """What the pipeline writes behind a prompt, its numbers and their intervals. objects: it gets the model itself."""
    if parse(transformers.__version__) < parse("5.24"):
        return "refused"
    given: dict[str, Any] = {"model": str(folder), **trust}
    if objects:
        model = AutoModelForCausalLM.from_pretrained(folder, **trust)
        given = {"model": model, "tokenizer": AutoTokenizer.from_pretrained(folder, **trust)}
    pipe = pipeline("text-generation", **given)
    return str([pipe(PROMPTS[0], max_new_tokens=9, **mode)[0] for mode in ({}, {"mode": "individual", "seed": 3})])


class _WithoutPackage:
    """In front of all finders."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.split(".")[0] == "cqwen_dist":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main(out: str, *folders: str) -> None:
    sys.meta_path.insert(0, _WithoutPackage())
    trust = {"trust_remote_code": True}
    found = [answers(Path(folder), **trust) for folder in folders]
    model, again = AutoModelForCausalLM.from_pretrained(folders[0], **trust), Path(f"{folders[0]}-again")
    model.save_pretrained(again)
    AutoTokenizer.from_pretrained(folders[0], **trust).save_pretrained(again)
    further = {"saved again": piped(again, **trust), "objects": piped(again, objects=True, **trust)}
    found.append({**further, "learnt": [learnt(Path(f), **trust) for f in folders]})
    (snippet,) = re.findall(r"```python\n(.*?)```", Path(folders[0], "README.md").read_text(encoding="utf-8"), re.S)
    exec(snippet.replace('"."', repr(folders[0])), {})
    torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
