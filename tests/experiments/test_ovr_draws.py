"""experiments.ovr_draws: its measures by hand, and the command on a tiny base."""

from pathlib import Path

import pytest
from support.runs import write_texts
from support.tiny import tiny_base

from cqwen_dist.data.tokenizer import train_tokenizer
from experiments.ovr_draws import SETTINGS, main


def test_every_setting_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_texts(tmp_path / "texts.jsonl", 90)
    trained = train_tokenizer(data.read_text().splitlines(), 500)
    trained.save_pretrained(tmp_path)
    tiny_base(vocab_size=len(trained)).save_pretrained(tmp_path)
    main(str(tmp_path), data, prompts=2, copies=1, words=3)
    said = capsys.readouterr().out.splitlines()
    assert "median sum P" in said[0]
    assert all("1000: 100 %" in line for line in said[1:5]), "all words have all of it"
    assert [line.split(" | ")[0].strip("| ") for line in said[5:]] == [mode for mode, _ in SETTINGS]
    assert all(float(line.split(" | ")[2]) > 1.0 for line in said[5:])
