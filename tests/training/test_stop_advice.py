"""What a stop says: the command that goes on."""

from pathlib import Path
from typing import NoReturn

import pytest
import typer

from cqwen_dist import api
from cqwen_dist.cli import runs
from cqwen_dist.parallel.collectives import Stopped

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_ctrl_c_prints_how_to_resume(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(*_: object, **__: object) -> NoReturn:
        raise Stopped("SIGINT")

    monkeypatch.setattr(api, "train", stopped)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(typer.Exit) as ended:
        runs.train(CONFIG, ["run.dir=my runs/a", "train.eval_every=7"])
    assert ended.value.exit_code == 75
    assert capsys.readouterr().err == "to go on: cqwen train 'my runs/a'\n"
