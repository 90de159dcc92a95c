"""Verbs before a run: init, config, prepare. Heavy imports are inside, so that --help is instant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cqwen_dist.config.errors import UserError, writing
from cqwen_dist.console import AsJson, ConfigFile, Overrides, load, quiet_libraries, slug

_PER_TOKEN = 3  # characters per token, a low estimate so that nearly all texts fit
_HIDDEN = 896  # hidden size of the default base; the learning rate of W_loc, a dense map, depends on it
_CONFIG = """\
# Made by `cqwen init`: {name}.
# All other keys have defaults: cqwen config schema --basic
model:
  name_or_path: {base}  # a folder with safetensors, or a hub name
  lora: {{r: 16, alpha: 32}}
data:
  train: {data}
  eval_fraction: 0.1  # share of texts held out for evaluation
  sequence_length: {length}  # tokens; longer texts are cut into pieces (or long_texts: truncate, drop)
{keys}stages:
  # First only the heads (z is computed once and cached on disk), then also adapters in the backbone.
  - name: heads
    train: [heads]
    epochs: 2
    lr: {rate}  # 0.012 / {hidden}, the hidden size{guess}; word rows use a tenth of it
    lr_groups: {{classifier: {tenth}, regression: 1.0e-3, thresholds: 1.0e-3}}
    warmup_steps: 20
  - name: lora
    train: [heads, embedding, lora]
    epochs: 2
    lr: {rate}
    lr_groups: {{classifier: {tenth}, regression: 1.0e-3, thresholds: 1.0e-3, embedding: 1.0e-4, lora: 2.0e-4}}
    warmup_steps: 20
train:
  global_batch_size: 32  # texts per optimizer step, over all ranks
  micro_batch_size: 4  # per rank and forward pass; less needs less memory
  precision: bf16  # on a CPU without AMX fp32 is faster
  eval_every: 50
  checkpoint_every: 100
run:
  dir: {run}
  # wandb: online  # curves in Weights & Biases; offline on nodes without a network, then `wandb sync`
"""


def init(
    data: Annotated[str, typer.Option(help="Texts, chats or a table: .jsonl, .json, .csv, .parquet, .txt, a folder.")],
    base: Annotated[str, typer.Option(help="A model's folder or hub name.")] = "Qwen/Qwen2.5-0.5B",
    target: Annotated[str | None, typer.Option(help="Table column whose number the model learns to write.")] = None,
    out: Annotated[Path, typer.Option(help="Config file to write.")] = Path("run.yaml"),
) -> None:
    """Look at your data, write a commented config for it, and check both."""
    from cqwen_dist.config.reading import load_config
    from cqwen_dist.data.recipes import recognise
    from cqwen_dist.data.records import ReadReport
    from cqwen_dist.data.sources import read_texts
    from cqwen_dist.run.files import written_whole

    if out.exists():
        raise UserError("--out", str(out), "a file that does not exist yet")
    recipe = recognise(data, target)
    text = _config(data, base, recipe, out)
    with writing("--out", out), written_whole(out) as partial:
        partial.write_text(text, encoding="utf-8")
        checked = load_config(partial)
        shown = "messages_field" not in recipe.keys  # a chat needs the tokenizer's template
        first = next(read_texts(data, checked.data, ReadReport(), "--data"), None) if shown else None
    typer.echo(f"{data}: {recipe.name}")
    if first is not None:
        typer.echo("the first text as it will be read:")
        typer.echo("".join(f"    {line}\n" for line in first.text.splitlines()[:12]), nl=False)
    typer.echo(f"wrote {out}\n  cqwen prepare {out}    # data statistics; the first text as the model reads it")
    typer.echo(f"  cqwen plan {out} --gpus-per-node 1    # does it fit, how long\n  cqwen train {out}")
    if column := recipe.keys.get("target_field"):
        typer.echo(f"or, with steps chosen by the table:\n  cqwen fit {data} --target {column} --base {base}")


def _config(data: str, base: str, recipe: Any, out: Path) -> str:
    path, hidden = Path(base).expanduser(), _HIDDEN
    if path.is_dir():
        try:
            hidden = int(json.loads((path / "config.json").read_text(encoding="utf-8"))["hidden_size"])
        except (OSError, ValueError, KeyError) as error:
            raise UserError("--base", base, f"a folder with a config.json of a model ({error})") from None
    length = 64
    while length * _PER_TOKEN < recipe.length and length < 2048:
        length *= 2
    return _CONFIG.format(
        name=json.dumps(recipe.name)[1:-1],
        base=json.dumps(base),
        data=json.dumps(data, ensure_ascii=False),
        length=length,
        keys="".join(f"  {key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in recipe.keys.items()),
        rate=f"{0.012 / hidden:.1e}",
        hidden=hidden,
        guess="" if path.is_dir() else " of Qwen2.5-0.5B (put your base's)",
        tenth=f"{0.0012 / hidden:.1e}",
        run=f"runs/{slug(out.stem)}",
    )


def config_validate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config and print it with all defaults."""
    typer.echo(load(config, overrides).to_yaml(), nl=False)
    typer.echo(f"{config}: valid", err=True)


def config_schema(
    basic: Annotated[bool, typer.Option("--basic", help="Only the keys that most runs set.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables instead.")] = False,
) -> None:
    """JSON Schema of a config file, for completion in editors."""
    from cqwen_dist.config.keys import json_schema

    schema = json_schema(basic)
    if markdown:
        from cqwen_dist.config.keys import schema_markdown

        schema = schema_markdown(json.loads(schema))
    typer.echo(schema, nl=not markdown)


def prepare(
    config: ConfigFile,
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: data.workers, or all cores.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise the data once, in parallel, for every run that uses it, and print its statistics.

    The folder (under data.cache_dir) is named by a digest of the sources, the
    tokenizer and the config, so no work is repeated. Runs find it automatically
    if data.cache_dir is set or the files are large.
    """
    checked = load(config, overrides)
    quiet_libraries()
    from cqwen_dist.cli.prepared import prepare_and_show

    prepare_and_show(checked, workers, as_json)
