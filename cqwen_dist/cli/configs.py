"""Verbs before a run: init, plan, doctor, accept, `cqwen config`. Imports are local: --help is instant."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cqwen_dist.config.errors import UserError, writing
from cqwen_dist.config.trainable import DENSE, dense_rate, group_rates
from cqwen_dist.console import (
    AsJson,
    ConfigFile,
    DecimalComma,
    Overrides,
    Words,
    echo,
    load,
    plain_console,
    print_document,
    print_json,
    quiet_libraries,
    slug,
)
from cqwen_dist.tools.plan.question import Question

_HIDDEN = 896  # hidden size of the default base; the learning rate of W_loc, a dense map, depends on it


def init(
    data: Annotated[str, typer.Option(help="Texts, chats or a table: .jsonl, .json, .csv, .parquet, .txt, a folder.")],
    base: Annotated[str, typer.Option(help="A model's folder or hub name.")] = "Qwen/Qwen2.5-0.5B",
    target: Annotated[str | None, typer.Option(help="Table column whose number the model learns to write.")] = None,
    decimal_comma: DecimalComma = None,
    out: Annotated[Path, typer.Option(help="Config file to write.")] = Path("run.yaml"),
) -> None:
    """Look at your data, write a commented config for it, and check both."""
    from cqwen_dist.config.data import DataConfig
    from cqwen_dist.config.reading import load_config
    from cqwen_dist.config.templates import template
    from cqwen_dist.data.amount import amount_of, cut_apart, suited
    from cqwen_dist.data.recipes import recognise
    from cqwen_dist.data.records import ReadReport
    from cqwen_dist.data.sources import read_texts
    from cqwen_dist.run.files import written_whole

    if out.exists():
        raise UserError("--out", str(out), "a file that does not exist yet")
    recipe, facts = recognise(data, target, decimal_comma), _facts_of(base)
    read = DataConfig(train=data, **recipe.keys)
    amount = amount_of(read, Path(base).expanduser())
    suits = suited(amount, facts.get("max_position_embeddings"), read.target_field is not None)
    cut = [*cut_apart(amount, read, suits.length)]
    hidden = facts.get("hidden_size", _HIDDEN)
    text = template("cqwen_dist.cli", "init.yaml.j2").render(
        name=json.dumps(recipe.name)[1:-1],
        base=base,
        data=data,
        suits=suits,
        keys=recipe.keys,
        rate=f"{dense_rate(hidden):.1e}",
        dense=DENSE,
        hidden=hidden,
        guess="" if facts else " of Qwen2.5-0.5B (put your base's)",
        groups=", ".join(f"{group}: {own:.1e}" for group, own in group_rates(hidden).items()),
        run=f"runs/{slug(out.stem)}",
    )
    with writing("--out", out), written_whole(out) as partial:
        partial.write_text(text, encoding="utf-8")
        checked = load_config(partial)
        shown = "messages_field" not in recipe.keys  # a chat needs the tokenizer's template
        first = next(read_texts(data, checked.data, ReadReport(), "--data"), None) if shown else None
    echo(f"{data}: {recipe.name}")
    for note in recipe.notes:
        echo(note)
    for note in cut:
        echo(f"note: {note}", err=True)
    if amount.error is not None:
        echo(f"note: {amount.error}", err=True)
    if not facts:
        echo(f"note: no folder {base} here, nor a model that is known: the rates are Qwen2.5-0.5B's", err=True)
    echo(f"{amount.words()}: {suits.words()}")
    if first is not None:
        echo("the first text as it will be read:")
        echo("".join(f"    {line[:200]}\n" for line in first.text.splitlines()[:12]), nl=False)
    echo(f"wrote {out}\n  cqwen prepare {out}    # data statistics; the first text as the model reads it")
    echo(f"  cqwen plan {out} --gpus-per-node 1    # does it fit, how long\n  cqwen train {out}")
    if column := recipe.keys.get("target_field"):
        words = map(shlex.quote, (data, "--target", column, "--base", base))
        echo(f"or, with steps chosen by the table:\n  cqwen fit {' '.join(words)}")


def _facts_of(base: str) -> dict[str, Any]:
    """The base's config.json; a public model's sizes; {} for an unknown name. Raises `UserError`."""
    from cqwen_dist.sizes.architecture import known_architecture

    path = Path(base).expanduser()
    if not path.is_dir():
        return known_architecture(base) or {}
    try:
        found: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return {**found, "hidden_size": int(found["hidden_size"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("--base", base, f"a folder with a config.json of a model ({error})") from None


def validate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config, also against its data and base if they are here, and print it with all defaults."""
    checked = load(config, overrides)
    echo(checked.to_yaml(), nl=False)
    for note in _check_inputs(checked):
        echo(f"note: {note}", err=True)
    echo(f"{config}: valid", err=True)


def _check_inputs(config: Any) -> list[str]:
    """Notes: checks that were not possible, and stages that do not reach their rate. Raises `UserError`."""
    from cqwen_dist.config.data import as_list, source_files
    from cqwen_dist.sizes.architecture import read_architecture

    name, notes = config.model.name_or_path, []
    if name is None or Path(name).expanduser().is_dir():
        config.fit_sizes(read_architecture(config))
    else:
        notes.append(f"model.name_or_path: {name} is no folder here, so the base is not checked")
    try:
        files = [file for source in as_list(config.data.train) for file in source_files(source, "data.train")]
    except UserError as error:
        return [*notes, f"{error.key}: {error.found} here, so the data is not checked"]
    if any(file.startswith("hf:") for file in files):
        return [*notes, "data.train is on a hub, so the data is not checked"]
    if any(file.startswith("bundled:") for file in files):
        return notes  # shipped with the tools: nothing to mistake, and reading it would import numpy and the tools
    from cqwen_dist.data.amount import amount_of, cut_apart, never_warm

    amount = amount_of(config.data, Path(config.base_folder).expanduser())
    if amount.error is not None:
        raise amount.error
    return [*notes, *cut_apart(amount, config.data, config.data.sequence_length), *never_warm(amount, config)]


def schema(
    basic: Annotated[bool, typer.Option("--basic", help="Only the keys that most runs set.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables instead.")] = False,
) -> None:
    """JSON Schema of a config file, for completion in editors."""
    from cqwen_dist.config.keys import json_schema, schema_markdown

    text = json_schema(basic)
    echo(schema_markdown(json.loads(text)) if markdown else text, nl=not markdown)


def plan(config: ConfigFile, overrides: Words = None, *, question: Question, as_json: AsJson = False) -> None:
    """Predict whether a run fits, how long it takes, and which layout is best. Needs no torch and no weights."""
    from cqwen_dist.config.one_job import load_configs
    from cqwen_dist.tools.plan.command import run

    document, shown = run(load_configs(config, overrides or []), question)
    print_document(document, as_json, lambda _: shown)


def doctor(
    folder: Annotated[Path, typer.Option(help="The run folder, tested on all nodes.")] = Path("runs"),
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine, to measure between.")] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="Examine all hosts in this file, over ssh.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only two message sizes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Examine this machine; under srun, --ranks or --hostfile all machines and their network."""
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError("--folder", str(folder), "a folder, or one that can be made")
    if as_json and hostfile is not None:
        raise UserError("--json", True, "without --hostfile: pdsh puts the host's name before each line")
    if hostfile is not None or ranks > 1:
        from cqwen_dist.cluster.launch import run_words

        words = ["doctor", "--folder", str(folder), *["--quick"] * quick, *["--json"] * as_json]
        raise typer.Exit(run_words(words, ranks, hostfile, folder))
    quiet_libraries()
    from cqwen_dist.tools.site.doctor import examine, page

    document = examine(folder, quick)
    if document is None:
        return
    if as_json:
        print_json(document)
    else:
        plain_console(width=None if sys.stdout.isatty() else 160).print(page(document))
    raise typer.Exit(1 if document["red"] else 0)


def accept(
    ranks: Annotated[int, typer.Option(min=2, help="Processes on this machine.")] = 2,
    hostfile: Annotated[
        Path | None, typer.Option(help="Lines `host slots=N`: use these hosts, over ssh, instead of --ranks.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="A new folder that all hosts share.")] = Path("accept"),
    as_json: AsJson = False,
) -> None:
    """Check this site: do N ranks match one rank, does a killed run resume?"""
    if hostfile is not None:
        from cqwen_dist.cluster.launch import read_hostfile

        ranks = sum(read_hostfile(hostfile).values())
    quiet_libraries()
    from cqwen_dist.parallel.collectives import Stopped
    from cqwen_dist.tools.site.accept import Site, table

    try:
        found = Site(ranks, hostfile, folder.absolute(), lambda line: echo(line, err=True)).accept()
    except Stopped:
        raise typer.Exit(75) from None
    print_document(found, as_json, table)
    raise typer.Exit(0 if found["passed"] else 1)
