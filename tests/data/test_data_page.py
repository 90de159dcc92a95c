"""docs/data.md and docs/recipes.md: every example is a config that is taken, every source one that is read."""

import re
from pathlib import Path

import pytest
import yaml

from cqwen_dist.config import DataConfig, load_config
from cqwen_dist.config.data import RECIPES
from cqwen_dist.data.chat import CHATML, Chat
from cqwen_dist.data.load import load_datasets
from cqwen_dist.data.recipes import recognise
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_train
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.tools.diabetes import diabetes_texts

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "data.md").read_text(encoding="utf-8")
HEAD, *SECTIONS = (DOCS / "recipes.md").read_text(encoding="utf-8").split("\n## ")
# A file, its lines, the data section, and what is learnt of the first record.
RECIPE = re.compile(r"(.*?)\n`(\S+)`.*?```\n(.*?)```.*?```yaml\n(.*?)```.*?```\n(.*?)\n```", re.DOTALL)


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_every_example_of_the_page_is_a_valid_config(example: str) -> None:
    DataConfig.model_validate(yaml.safe_load(example))


@pytest.fixture(scope="module")
def tokenizer() -> NumericalAwareTokenizer:
    inner = train_tokenizer(diabetes_texts("train"), 400)
    inner.chat_template = CHATML
    return NumericalAwareTokenizer(inner)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.split("\n")[0])
def test_every_recipe_of_the_page_reads_its_example_lines(section, tmp_path, monkeypatch, tokenizer) -> None:
    found = RECIPE.match(section)
    assert found is not None
    _, name, lines, data, learnt = found.groups()
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(lines, encoding="utf-8")
    rest = re.findall(r"```yaml\n(.*?)```", HEAD, re.DOTALL)[0]
    Path("run.yaml").write_text(rest + data, encoding="utf-8")
    config = load_config("run.yaml").data
    dataset = load_datasets(config, tokenizer).train
    assert dataset.report.texts == 5
    assert dataset.report.targets >= 4
    first = next(read_train(config, ReadReport(), Chat(tokenizer.tokenizer)))
    spans = first.learnt or [(0, len(first.text))]
    assert "".join(first.text[start:end] for start, end in spans).rstrip("\n") == learnt
    written = DataConfig(train=config.train, **recognise(str(config.train)).keys)
    by_init = next(read_train(written, ReadReport(), Chat(tokenizer.tokenizer)))
    assert (by_init.text, by_init.target) == (first.text, first.target), "as with what `cqwen init` writes"


def test_the_pages_table_of_recipes_equals_the_code() -> None:
    rows = [
        line.strip("|").split(" | ") for line in HEAD.splitlines() if line.startswith("| `") and "data." not in line
    ]
    assert {name for row in rows for name in re.findall(r"`([a-z-]+)`", row[0])} == set(RECIPES)
    for row in rows:
        name = re.findall(r"`([a-z-]+)`", row[0])[0]
        keys = {key: value for found in re.findall("`(.*?)`", row[1]) for key, value in yaml.safe_load(found).items()}
        assert keys == {key: value.replace("TARGET", "price") for key, value in RECIPES[name].items()}


def test_a_recipe_sets_only_keys_that_are_not_given() -> None:
    config = DataConfig.model_validate({"train": "a", "recipe": "alpaca", "prompt_template": "{instruction}: "})
    assert (config.prompt_template, config.text_template) == ("{instruction}: ", "{output}")
    assert DataConfig.model_validate(config.model_dump()) == config
    for given, told in (
        ({"recipe": "chat", "text_template": "{a}"}, "cannot be combined with data.messages_field"),
        ({"recipe": "table"}, "the column whose number is to be written"),
        ({"recipe": "gpt"}, "'chat', 'sharegpt', 'alpaca'"),
    ):
        with pytest.raises(ValueError, match=told):
            DataConfig.model_validate({"train": "a", **given})
