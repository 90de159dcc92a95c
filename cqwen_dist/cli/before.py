"""The verbs before a run: init, config, prepare, plan, doctor. Heavy imports inside, so that --help is instant."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cqwen_dist.cli.arguments import AsJson, ConfigFile, Overrides, load, print_document
from cqwen_dist.config import UserError
from cqwen_dist.config.errors import writing
from cqwen_dist.console import plain_console, print_json, quiet_libraries
from cqwen_dist.run.files import write_atomically

_PER_TOKEN = 3  # characters, at least, so that sequences hold nearly all texts
_HIDDEN = 896  # of the default base; the rate of W_loc, a dense map, goes by it
_CONFIG = """\
# Made by `cqwen init`: {name}.
# Keys that are not here have defaults: cqwen config schema --basic
model:
  name_or_path: {base}  # a folder with safetensors, or a hub name
  lora: {{r: 16, alpha: 32}}
data:
  train: {data}
  eval_fraction: 0.1  # of the texts, never trained on
  sequence_length: {length}  # tokens; longer texts are cut into pieces (or long_texts: truncate, drop)
{keys}stages:
  # First the heads alone (z is computed once and read from disk), then adapters in the backbone, too.
  - name: heads
    train: [heads]
    epochs: 2
    lr: {rate}  # 0.012 / {hidden}, the hidden size{guess}; the words' own rows at a tenth of it
    lr_groups: {{classifier: {tenth}, regression: 1.0e-3, thresholds: 1.0e-3}}
    warmup_steps: 20
  - name: lora
    train: [heads, embedding, lora]
    epochs: 2
    lr: {rate}
    lr_groups: {{classifier: {tenth}, regression: 1.0e-3, thresholds: 1.0e-3, embedding: 1.0e-4, lora: 2.0e-4}}
    warmup_steps: 20
train:
  global_batch_size: 32  # texts an optimizer step, over all ranks
  micro_batch_size: 4  # a rank and forward: less memory with less
  precision: bf16  # on a CPU without AMX fp32 is faster
  eval_every: 50
  checkpoint_every: 100
run:
  dir: {run}
"""


def init(
    data: Annotated[str, typer.Option(help="Texts, chats or a table: .jsonl, .json, .csv, .parquet, .txt, a folder.")],
    base: Annotated[str, typer.Option(help="A model's folder or hub name.")] = "Qwen/Qwen2.5-0.5B",
    target: Annotated[str | None, typer.Option(help="A table's column whose number is to be written.")] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("run.yaml"),
) -> None:
    """Look at your data, write a commented config for it, and check both."""
    from cqwen_dist.config import load_config
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
    typer.echo(f"wrote {out}\n  cqwen prepare {out}    # what is in the data; the first text as the model reads it")
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
        run=json.dumps(f"runs/{out.stem}"),
    )


def config_validate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config and print it as resolved."""
    typer.echo(load(config, overrides).to_yaml(), nl=False)
    typer.echo(f"{config}: valid", err=True)


def config_schema(
    basic: Annotated[bool, typer.Option("--basic", help="Only the keys that most runs set.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables in Markdown instead.")] = False,
) -> None:
    """JSON Schema of a config file, so that editors complete keys."""
    from cqwen_dist.config import json_schema

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
    """Tokenise the data once, in parallel, for all runs on it, and print what it contains.

    The folder (under data.cache_dir) is named by what is in the sources, the
    tokenizer and the config, so nothing is done twice. A run finds it by itself
    where data.cache_dir is given or the files are large.
    """
    checked = load(config, overrides)
    quiet_libraries()
    from cqwen_dist.cli.prepared import prepare_and_show

    prepare_and_show(checked, workers, as_json)


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="Ranks on each machine; 0: one CPU rank each.")] = 1,
    gpu_memory_gib: Annotated[float | None, typer.Option(help="Memory of one GPU; default: that of --gpu.")] = None,
    gpu: Annotated[str, typer.Option(help="Rates of this GPU: h200, h100 (default), a100, l40s, cpu.")] = "",
    interconnect: Annotated[str, typer.Option(help="Between machines, a rank: ib400, ib200, eth100, ...")] = "ib400",
    calibrate: Annotated[Path | None, typer.Option(help="Measured rates: `bench step --json`'s document.")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Texts in an epoch; default: counted if cheap.")] = None,
    text_tokens: Annotated[
        float | None, typer.Option(min=1, help="Tokens of a packed text (data.pack); default: all of its row.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Try every layout; print the best and why.")] = False,
    scale: Annotated[bool, typer.Option("--scale", help="Efficiency from 1 to 1,024 GPUs by layout.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the config (with --search: of the best layout).")] = None,
    as_json: AsJson = False,
) -> None:
    """Before a run: does it fit, how long does it take, which layout is best. No torch, no weights."""
    from cqwen_dist.tools.plan.command import run

    document, shown = run(
        load(config, overrides),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu_memory_gib=gpu_memory_gib,
        gpu=gpu,
        interconnect=interconnect,
        calibration=calibrate,
        sequences=sequences,
        text_tokens=text_tokens,
        searching=search,
        scale=scale,
        write=write,
    )
    print_document(document, as_json, lambda _: shown)


def doctor(
    folder: Annotated[Path, typer.Option(help="The runs' folder: measured, compared on all nodes.")] = Path("runs"),
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine; measure between them.")] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="Examine all hosts of this file, over ssh.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="As a preflight does: no operators, two sizes.")] = False,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """What this machine has and lacks; under srun, --ranks or --hostfile all machines and their network."""
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError("--folder", str(folder), "a folder, or one that can be made")
    if hostfile is not None or ranks > 1:
        from cqwen_dist.cluster.launch import run_words

        words = ["doctor", "--folder", str(folder), *["--quick"] * quick]
        if not as_json or hostfile is None:
            raise typer.Exit(run_words([*words, *["--json"] * as_json], ranks, hostfile, folder))
        written = folder / f".doctor-{os.getpid()}.json"  # pdsh puts the host's name before each line of a rank
        code = run_words([*words, "--out", str(written)], ranks, hostfile, folder, quiet=True)
        if written.is_file():
            typer.echo(written.read_text(encoding="utf-8"))
            written.unlink()
        raise typer.Exit(code)
    quiet_libraries()
    from cqwen_dist.tools.site.doctor import examine, page

    document = examine(folder, quick)
    if document is None:
        return
    if out is not None:
        with writing("--folder", folder, "a folder that every node may write"):
            write_atomically(out, json.dumps(document, indent=2))
    elif as_json:
        print_json(document)
    else:
        plain_console(width=None if sys.stdout.isatty() else 160).print(page(document))
    raise typer.Exit(1 if document["red"] else 0)


def accept(
    ranks: Annotated[int, typer.Option(min=2, help="Processes on this machine.")] = 2,
    gpus: Annotated[int | None, typer.Option(min=2, help="As --ranks, each with a GPU of this machine.")] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Lines `host slots=N`: use these hosts, over ssh, instead of --ranks.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="A new folder, which every host sees.")] = Path("accept"),
    as_json: AsJson = False,
) -> None:
    """Whether ranks here equal one, say and hold what is planned, how fast they are, and survive a kill: a table."""
    if gpus is not None:
        import torch

        if gpus > (here := torch.cuda.device_count()):
            raise UserError("--gpus", gpus, f"at most {here}, the GPUs here; --ranks needs none")
        ranks = gpus
    if hostfile is not None:
        from cqwen_dist.cluster.hostfile import read_hostfile

        ranks = sum(read_hostfile(hostfile).values())
    quiet_libraries()
    from cqwen_dist.parallel.collectives import Stopped
    from cqwen_dist.tools.site.accept import Site, table

    try:
        found = Site(ranks, hostfile, folder.absolute(), lambda line: typer.echo(line, err=True)).accept()
    except Stopped:
        raise typer.Exit(75) from None
    print_document(found, as_json, table)
    raise typer.Exit(0 if found["passed"] else 1)
