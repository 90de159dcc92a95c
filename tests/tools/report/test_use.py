"""generate, predict and export from the command line, on an exported folder."""

import json
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from support.exported import tiny_pair, write_folder

PROMPT = "tea costs 3.5 and milk costs"
Ran = subprocess.CompletedProcess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("use") / "model", *tiny_pair())


@pytest.fixture
def cqwen(cqwen: Callable[..., Ran], folder: Path) -> Callable[..., Ran]:
    """Of the exported folder."""

    def run(verb: str, *args: object, code: int = 0) -> Ran:
        done = cqwen(verb, folder, *args)
        assert done.returncode == code, done.stderr[-2000:]
        if code == 2:
            assert len(done.stderr.splitlines()) == 1
        return done

    return run


def test_generate_json_is_one_document_with_a_record_of_every_token(cqwen: Callable[..., Ran]) -> None:
    args = ("--prompt", PROMPT, "--prompt", "we have", "--max-new-tokens", 12, "--json")
    found = json.loads(cqwen("generate", *args).stdout)
    assert found == json.loads(cqwen("generate", *args).stdout)
    assert [o["prompt"] for o in found["outputs"]] == [PROMPT, "we have"]
    for output in found["outputs"]:
        assert len(output["tokens"]) == 12 or output["end"] == "eos"
        for token in output["tokens"]:
            assert 0.0 <= token["p"] <= 1.0
        for number in output["numbers"]:
            (a, b), (c, d), (e, f) = (number["intervals"][level] for level in ("0.5", "0.9", "0.95"))
            assert e < c < a < number["value"] < b < d < f
    assert any(o["numbers"] for o in found["outputs"])


def test_generate_stream_prints_the_text_as_it_comes(cqwen: Callable[..., Ran]) -> None:
    args = ("--prompt", PROMPT, "--max-new-tokens", 12, "--mode", "causal", "--seed", 3, "--digits", 4)
    assert cqwen("generate", *args, "--stream").stdout == cqwen("generate", *args).stdout


def test_individuals_are_shown_side_by_side(cqwen: Callable[..., Ran]) -> None:
    args = ("--prompt", PROMPT, "--individuals", 5, "--seed", 1, "--max-new-tokens", 8)
    shown = cqwen("generate", *args).stdout
    assert "5 texts differ" in shown or "of 5 texts differ" in shown
    found = json.loads(cqwen("generate", *args, "--json").stdout)
    assert (found["mode"], len(found["outputs"]), found["diversity"]["n"]) == ("individual", 5, 5)
    mixed = json.loads(cqwen("generate", *args, "--mode", "words=compatible,numbers=individual", "--json").stdout)
    assert (mixed["mode"], len(mixed["outputs"])) == ("individual", 5)
    calm = json.loads(cqwen("generate", *args, "--temperature", 0, "--json").stdout)
    assert calm["diversity"]["distinct"] == 1
    noises = json.loads(cqwen("generate", *args, "--mode", "noise", "--json").stdout)
    assert (noises["mode"], len(noises["outputs"])) == ("noise", 5)


def test_multi_label_prints_every_word_above_the_threshold(cqwen: Callable[..., Ran]) -> None:
    args = ("--prompt", PROMPT, "--prompt", "we have", "--above", 0.02)
    found = json.loads(cqwen("generate", *args, "--json").stdout)
    assert [output["prompt"] for output in found["outputs"]] == [PROMPT, "we have"]
    words = found["outputs"][0]["words"]
    assert words[0]["text"] == "<NUM>"
    assert all(a["p"] >= b["p"] > 0.02 for a, b in pairwise(words))
    assert f"'<NUM>'   P {words[0]['p']:.4g}" in cqwen("generate", *args).stdout
    none = cqwen("generate", *args, "--decision-threshold", 1e9, "--json").stdout
    assert not any(output["words"] for output in json.loads(none)["outputs"])


def test_export_writes_other_forms(cqwen: Callable[..., Ran], tmp_path: Path) -> None:
    assert "exported to" in cqwen("export", tmp_path / "a", "--dtype", "bf16", "--shard-size", "50KB").stdout
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("verb", "args", "said"),
    [
        ("generate", ["--prompt", "x", "--individuals", 2, "--mode", "causal"], "--mode: found 'causal'"),
        ("generate", ["--prompt", "x", "--prompt", "y", "--stream"], "--stream"),
        ("generate", ["--prompt", "x \udcff"], r"text: found '\udcff', allowed: Unicode text"),
        ("generate", ["--prompt", "x", "--digits", "many"], "--digits: found 'many'"),
        ("generate", ["--prompt", "x", "--mode", "causal", "--top-p", 0.5], "top_p: found 0.5, allowed: nothing but"),
        ("generate", ["--prompt", "x", "--mode", "words=ovr,number=ovr"], "mode: found 'words=ovr,number=ovr'"),
        ("generate", ["--prompt", "x", "--word-temperature", 2], "word_temperature: found 2.0, allowed: auto, or a"),
        ("generate", ["--prompt", "x", "--device", "moon"], "--device: found 'moon'"),
        ("predict", ["none.csv", "--template", "{a}"], "FILE: found no file none.csv"),
    ],
)
def test_a_users_mistake_is_one_line(cqwen: Callable[..., Ran], verb: str, args: list[object], said: str) -> None:
    assert said in cqwen(verb, *args, code=2).stderr
