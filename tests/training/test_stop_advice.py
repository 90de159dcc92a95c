"""What a stop says: the command that goes on."""

from pathlib import Path
from typing import NoReturn

import pytest
import typer

from cqwen_dist import api
from cqwen_dist.cli import runs
from cqwen_dist.parallel.collectives import Stopped

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize(("folder", "shown"), [("runs/a", "runs/a"), ("my runs/a", "'my runs/a'")])
def test_ctrl_c_prints_the_command_that_resumes(
    folder: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> NoReturn:
        raise Stopped("SIGINT")

    monkeypatch.setattr(api, "train", stopped)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(typer.Exit) as ended:
        runs.train(CONFIG, [f"run.dir={folder}", "train.eval_every=7"])
    assert ended.value.exit_code == 75
    assert capsys.readouterr().err == f"to go on: cqwen train {shown}\n"


def test_a_stopped_launch_prints_its_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "start_ranks", lambda *_, **__: 75)
    with pytest.raises(typer.Exit) as ended:
        runs.launch(CONFIG, ["run.dir=r"], ranks=2, hostfile=Path("my hosts"), env_file=None)
    assert ended.value.exit_code == 75
    assert capsys.readouterr().err == "to go on: cqwen launch r --ranks 2 --hostfile 'my hosts'\n"
