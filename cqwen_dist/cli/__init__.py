"""The command `cqwen`: a function per verb, a module per family of verbs, with heavy imports inside the functions.

It stands above the core and its wings, and gives both a verb.

Exit codes: 0 done (also if the run was already done), 2 wrong user input (one line with the value found and the values
allowed), 74 a file system does not answer, 75 stopped in order and can resume, 1 any other failure.
"""

import errno
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer

from cqwen_dist import __version__
from cqwen_dist.cli import configs, models, results, runs, table_verbs
from cqwen_dist.cli.streams import guard, outlive
from cqwen_dist.config.errors import DiskError, Said, UserError, reason_of
from cqwen_dist.console import echo

OTHER_RANKS_WAIT_S = 20.0
SYSTEM = (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG)
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # typer does not export it


def flat(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb as typer reads it: in place of a dataclass each of its fields is an option."""
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}
    parameters: list[Parameter] = []
    for name, own in signature(verb).parameters.items():
        if name in groups:
            of_field = get_type_hints(groups[name], include_extras=True)
            for each in fields(groups[name]):
                default = each.default if each.default_factory is MISSING else each.default_factory()
                default = Parameter.empty if default is MISSING else default
                kind = Parameter.KEYWORD_ONLY
                parameters.append(Parameter(each.name, kind, default=default, annotation=of_field[each.name]))
        else:
            parameters.append(own.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(verb)
    def called(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        verb(**given)

    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Distributed LoRA fine-tuning of CausalQwen: language models that read and write numbers as numbers.",
)
BEFORE, LOOK = "Before a run", "Look at a run"
VERBS: dict[str, tuple[Callable[..., None], ...]] = {
    BEFORE: (configs.init, configs.plan, runs.prepare, configs.doctor, configs.accept),
    "Train": (runs.quickstart, table_verbs.fit, runs.train, runs.launch, runs.sweep, runs.submit),
    LOOK: (results.status, results.report, results.evaluate),
    "Use a model": (models.generate, *table_verbs.USE, models.explain, models.serve, models.export),
}
GROUPS: dict[str, tuple[str, str, tuple[Callable[..., None], ...]]] = {
    "config": (BEFORE, "Check a config, or print its JSON Schema.", (configs.validate, configs.schema)),
    "checkpoint": (LOOK, "List or verify checkpoints.", (results.checkpoint_list, results.checkpoint_verify)),
}
for panel, verbs in VERBS.items():
    for verb in verbs:
        app.command("eval" if verb is results.evaluate else None, rich_help_panel=panel)(flat(verb))
for group, (panel, text, verbs) in GROUPS.items():
    app.add_typer(below := typer.Typer(no_args_is_help=True, help=text), name=group, rich_help_panel=panel)
    for verb in verbs:
        below.command(verb.__name__.removeprefix(f"{group}_"))(flat(verb))


def _version(asked: bool) -> None:
    if asked:
        echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print it.", callback=_version, is_eager=True)] = False,
) -> None:
    """Options for `cqwen` itself, before the verb."""


def main() -> None:
    """`cqwen`."""
    answer(app, "cqwen")


def answer(program: typer.Typer, name: str | None = None) -> None:
    """Run a verb; turn the user's mistakes into one line and exit code 2. name: in such lines; default: as started."""
    guard()
    rank = os.environ.get("RANK", "0")
    try:
        code = program(_without_local_rank(sys.argv[1:], os.environ), prog_name=name, standalone_mode=False)
        if code == 130:  # typer's, for KeyboardInterrupt
            echo("ended by Ctrl-C", err=True)
        sys.stdout.flush()  # while an error can still be reported
        sys.exit(code)
    except (UserError, OSError) as met:
        error = met if isinstance(met, UserError) else refused_by_system(met)
        if error is None:
            raise
        if rank != "0":
            # A launcher kills all ranks when one exits, so rank 0 must report first. If only this rank fails, it
            # reports after the wait.
            time.sleep(OTHER_RANKS_WAIT_S)
        echo(f"error: {error}" if rank == "0" else f"error: rank {rank}: {error}", err=True)
        sys.exit(74 if isinstance(error, DiskError) and error.away else 2)
    except USAGE_ERROR as error:
        if message := _usage(error):
            echo(message, err=True)
        sys.exit(2)
    except typer.Abort:
        sys.exit(1)
    except RuntimeError as error:
        if "RANK" in os.environ and "SLURM_STEP_ID" not in os.environ:
            _let_others_speak(error, rank)
        raise
    finally:
        outlive()  # Python flushes again at exit, after errors were reported


def _let_others_speak(error: RuntimeError, rank: str) -> None:
    """If a rank was lost, say so and wait: it may have failed, and then its exit code and message are the run's.

    Not for jobs of SLURM, which read how each rank ended.
    """
    from cqwen_dist.parallel.collectives import LOST_RANK, cause_of

    if cause_of(error).name == LOST_RANK:
        echo(f"rank {rank}: {LOST_RANK}: {reason_of(error)}", err=True)
        time.sleep(1.5 * OTHER_RANKS_WAIT_S)


def _without_local_rank(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """A command's words without the `--local_rank=N` that `deepspeed` puts in front of them.

    LOCAL_RANK decides, and a different number is refused with `UserError`. Without a launcher the words stay as they
    are: for a person there is no such option.
    """
    local, kept, left = env.get("LOCAL_RANK"), [], list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if local is None or name not in ("--local_rank", "--local-rank"):
            kept.append(word)
        elif (given := value if equals else left.pop(0) if left else "no value") != local:
            raise UserError("--local_rank", given, f"{local}, as LOCAL_RANK has it")
    return kept


def refused_by_system(error: OSError) -> UserError | None:
    """`UserError` if the operating system denied access to a file or folder; else None."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UserError("ulimit -n", Said(error.strerror), "as many open files as a run needs: 1024 or more")
    if error.filename is None or error.errno not in SYSTEM:
        return None
    allowed = "a file or folder that this user may read and write, on a disk with room"
    return UserError("path", Said(error.strerror), allowed, os.fsdecode(error.filename))


def _usage(error: Exception) -> str:
    """One line for a mistake in verbs or options. Empty for a bare `cqwen` or `cqwen config`: help was printed."""
    message = error.format_message()  # type: ignore[attr-defined]
    if not message:
        return ""
    command = error.ctx.command_path if getattr(error, "ctx", None) else "cqwen"  # type: ignore[attr-defined]
    return f"error: {command}: {message[:1].lower()}{message[1:].rstrip('.')} (see {command} --help)"
