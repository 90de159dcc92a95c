"""The command: whatever is wrong in the user's input is one line on stderr and exit code 2."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from support.runs import VOCAB, cqwen_forked, write_config
from transformers import AutoTokenizer

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.console import print_json
from cqwen_dist.generate.continuation import continue_text

Command = Callable[..., CompletedProcess[str]]


@pytest.fixture
def refused(cqwen: Command) -> Callable[..., str]:
    """The one line of a command that must refuse."""

    def run(*args: object) -> str:
        done = cqwen(*args)
        assert done.returncode == 2, done
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith("error: ")
        return done.stderr

    return run


@pytest.fixture(scope="session")
def base(one_rank: Path) -> Path:
    """A base model's folder, tokenizer beside it."""
    return one_rank / "base"


@pytest.fixture
def config(tmp_path: Path, base: Path) -> Path:
    return write_config(tmp_path, model__architecture=None, model__tokenizer=None, model__name_or_path=str(base))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "x"], "cqwen: no such command 'trian'"),
        (["train"], "cqwen train: missing argument 'CONFIG' (see cqwen train --help)"),
        (["plan", "x", "--nodes", "two"], "cqwen plan: invalid value for '--nodes'"),
        (["config", "nothing"], "cqwen config: no such command 'nothing'"),
    ],
)
def test_unknown_verbs_and_options_are_refused(refused: Callable[..., str], words: list[str], said: str) -> None:
    assert refused(*words).startswith(f"error: {said}")


def test_explain_shows_what_decides_the_next_word(cqwen: Command, one_rank: Path) -> None:
    words = ["explain", one_rank, "--prompt", "tea costs 3.5 and milk", "--dims", 2, "--individuals", 3]
    done = cqwen(*words, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["outputs"]
    first = found["words"][0]
    assert math.isclose(sum(first["contributions"]) + first["rest"] + first["bias"], first["loc"], abs_tol=1e-9)
    assert (len(found["dims"]), len(found["words"]), len(found["individuals"])) == (2, 3, 3)
    shown = cqwen(*words).stdout
    assert "3 drawn individuals choose" in shown
    assert str(found["dims"][0]) in shown


@pytest.mark.parametrize(("words", "after"), [(["--local_rank=1"], False), (["--local-rank", "1"], True)])
def test_a_launchers_local_rank_is_accepted_and_checked(cqwen, refused, monkeypatch, words, after) -> None:
    """`deepspeed --module cqwen_dist train run.yaml` puts it in front of the verb."""
    line = ["config", "validate", "configs/quickstart.yaml", *words] if after else [*words, "config", "schema"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cqwen(*line).returncode == 0
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "--local_rank: found '1', allowed: 0, as LOCAL_RANK has it" in refused(*line)
    monkeypatch.delenv("LOCAL_RANK")
    assert "no such option: --local" in refused(*line)


def test_refuses_a_folder_that_is_not_a_run(refused: Callable[..., str], cqwen: Command, tmp_path: Path) -> None:
    for verb in (["status"], ["report"], ["checkpoint", "list"], ["checkpoint", "verify"]):
        for path in (tmp_path, tmp_path / "none"):
            assert "RUN" in (said := refused(*verb, path)) or "checkpoint" in said
    (tmp_path / "file").write_text("")
    assert "--folder: found" in refused("doctor", "--folder", tmp_path / "file")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.sed=1"], "train.sed"),
        (["nonsense"], "override: found 'nonsense', allowed: key=value"),
        (["parallel.vocab_group_size=2"], "parallel.vocab_group_size: found 2, allowed: a divisor of the 1 rank: 1"),
        (["model.lora.target_modules=[nope]"], "model.lora.target_modules: found 'nope', allowed: names out of q_"),
        ([f"model.num_token_id={VOCAB}"], f"ids below the model's vocabulary size {VOCAB}"),
        (["data.train=none.jsonl"], "data.train: found no file none.jsonl"),
        (["data.text_template={question}"], "missing field"),
        (["model.name_or_path=./nope"], "model.name_or_path: found './nope', allowed: a folder with a config.json"),
    ],
)
def test_a_wrong_config_is_one_line(refused: Callable[..., str], config: Path, overrides: list[str], said: str) -> None:
    assert said in refused("train", config, *overrides)


def test_refuses_a_missing_config_and_one_that_is_not_yaml(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "no such file" in refused("train", tmp_path / "none.yaml")
    assert "no such file" in refused("launch", tmp_path / "none.yaml", "--ranks", 2)
    assert "no such file" in refused("plan", tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    assert "bad.yaml, line" in refused("config", "validate", tmp_path / "bad.yaml")


def test_launch_checks_the_config_before_it_starts_ranks(refused: Callable[..., str], config: Path) -> None:
    assert "--ranks: found 0" in refused("launch", config, "--ranks", 0)
    assert "data.train" in refused("launch", config, "--ranks", 2, "data.train=none.jsonl")
    assert "stages.0.steps" in refused("launch", config, "--ranks", 2, "stages.0.steps=-1")


def test_refuses_a_vocabulary_smaller_than_the_tokenizer(refused, config, base, tmp_path) -> None:
    """Without the check labels would lie outside the vocabulary."""
    tokenizer, size = AutoTokenizer.from_pretrained(base), VOCAB + 9
    tokenizer.add_tokens([f"<{i}>" for i in range(size - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    said = refused("train", config, f"model.tokenizer={tmp_path / 'tokenizer'}", "model.num_token_id=null")
    assert f"of a tokenizer with {size} words" in said
    assert f"vocabulary size {VOCAB}" in said


def test_refuses_a_run_folder_that_cannot_be_made(refused: Callable[..., str], config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", "/proc/run"):
        assert f"run.dir: found '{path}', allowed: a folder that can be written" in refused(
            "train", config, f"run.dir={path}"
        )


@pytest.mark.parametrize("verb", ["generate", "verify", "train"])
def test_a_damaged_checkpoint_is_named_by_its_file(refused, one_rank, tmp_path, verb) -> None:
    run = tmp_path / "run"
    shutil.copytree(one_rank, run)
    path = checkpoint_folder(run, 6) / "heads.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    commands = {
        "verify": ["checkpoint", "verify", run],
        "train": ["train", one_rank.parent / "config.yaml", f"run.dir={run}"],
        "generate": ["generate", run, "--prompt", "tea costs", "--json"],
    }
    said = refused(*commands[verb])
    assert f"{path.parent}: checkpoint: found heads.safetensors: checksum differs from the manifest" in said
    assert "run.resume=last-good goes on from checkpoints/step-00000005" in said


def test_export_does_not_write_over_anything(refused: Callable[..., str], one_rank: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "out", tmp_path / "file"):
        assert f"OUT: found '{out}', allowed: a folder that does not exist yet, or is empty" in refused(
            "export", one_rank, out
        )
    assert "OUT" in refused("export", one_rank, tmp_path / "file" / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_json_output_has_null_for_figures_that_are_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.nan, "b": [1.5, {"c": -math.inf}], "d": "数"})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": None,
        "b": [1.5, {"c": None}],
        "d": "数",
    }


def test_status_list_and_verify_accept_a_good_run(cqwen: Command, one_rank: Path) -> None:
    assert json.loads(cqwen("status", one_rank, "--json").stdout)["status"] == "done"
    listed = cqwen("checkpoint", "list", one_rank).stdout
    assert [line.split("  ")[1:3] for line in listed.splitlines()] == [
        [f"step {step}", f"stage {'heads' if step <= 3 else 'lora'}"] for step in range(1, 7)
    ]
    assert cqwen("checkpoint", "verify", one_rank).stdout.endswith("good\n")
    validated = cqwen("config", "validate", one_rank / "config.yaml")
    assert validated.stdout == (one_rank / "config.yaml").read_text()
    assert validated.stderr.endswith("config.yaml: valid\n")


def test_generate_chat_uses_the_chat_template_and_ends_with_the_turn(cqwen: Command, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "2 and 3?"}, {"role": "assistant", "content": "5"}]
    (tmp_path / "texts.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 20)
    stage = {"name": "heads", "train": ["heads"], "steps": 1, "lr": 1e-3, "warmup_steps": 5}
    config = write_config(tmp_path, data__recipe="chat", data__eval_fraction=0.0, stages=[stage])
    assert "all of them are warm-up (warmup_steps 5)" in cqwen_forked("train", config).stdout
    exported = tmp_path / "out"
    assert cqwen("export", tmp_path / "run", exported).returncode == 0
    for folder in (tmp_path / "run", exported):
        model, tokenizer = load_trained(folder)
        turn_end = tokenizer.tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, turn_end]
        with torch.no_grad():
            model.model.action.threshold[turn_end] = -1e6  # the next word is the turn's end
        streamed: list[str] = []
        assert continue_text(model, tokenizer, ["2"], on_text=streamed.append)[0].end == "eos"
        assert streamed == []
        done = cqwen("generate", folder, "--chat", "--prompt", "2 and 3?", "--max-new-tokens", 1, "--json")
        asked = "<|im_start|>user\n2 and 3?<|im_end|>\n<|im_start|>assistant\n"
        assert json.loads(done.stdout)["outputs"][0]["prompt"] == asked
