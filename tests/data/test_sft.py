"""TRL's SFTTrainer on a CausalQwen: what is learnt is what `CausalQwenTokenizer` reads, numbers with their values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.exported import TEXTS, tiny_pair

from cqwen_dist.config import UserError
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer

pytest.importorskip("trl", reason="TRL is not installed (extra hf-tools)")

CHAT = [{"role": "user", "content": "tea costs 3.5"}, {"role": "assistant", "content": "milk costs 12"}]
ROWS = {
    "texts": [{"text": text} for text in [*TEXTS, "-0.25 and 0 and 1e300"]],
    "chats": [{"messages": CHAT}],
    "completions": [{"prompt": "tea costs 3.5 and ", "completion": "milk costs 12"}],
}


def trainer_of(rows: list[dict[str, Any]], folder: Path, **options: Any) -> Any:
    from trl import SFTConfig

    from cqwen_dist.data.sft import CausalQwenSFTTrainer

    model, tokenizer = tiny_pair()
    given = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1, **options}
    arguments = SFTConfig(str(folder), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, **given)
    data = Dataset.from_list(rows)
    return CausalQwenSFTTrainer(
        model, arguments, processing_class=CausalQwenTokenizer.of(tokenizer), train_dataset=data, eval_dataset=data
    )


@pytest.mark.parametrize("kind", ROWS)
def test_sft_trainer_learns_the_numbers_that_the_tokenizer_reads(kind: str, tmp_path: Path) -> None:
    trainer = trainer_of(ROWS[kind], tmp_path)
    model, tokenizer = trainer.model, trainer.processing_class
    (batch,) = trainer.get_eval_dataloader()
    end = "<|endoftext|>"
    whole = {
        "texts": lambda row: row["text"] + end,
        "chats": lambda row: tokenizer.apply_chat_template(row["messages"], tokenize=False),
        "completions": lambda row: row["prompt"] + row["completion"] + end,
    }[kind]
    wanted = tokenizer([whole(row) for row in ROWS[kind]], padding=True, return_tensors="pt")
    for name in wanted:
        assert torch.equal(batch[name], wanted[name]), name
    learnt = wanted["attention_mask"].bool()
    if kind == "completions":
        learnt[:, : len(tokenizer.encode(ROWS[kind][0]["prompt"]))] = False
    assert torch.equal(batch["labels"], wanted["input_ids"].masked_fill(~learnt, -100))
    with torch.no_grad():
        loss = float(model(**wanted, labels=batch["labels"]).loss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-4)
    trainer.train()
    with torch.no_grad():
        assert float(model.eval()(**wanted, labels=batch["labels"]).loss) < loss


def test_sft_packing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="packing: found True, allowed: False"):
        trainer_of(ROWS["texts"], tmp_path, packing=True)


def test_only_the_assistants_part_is_learnt_without_a_template(tmp_path: Path) -> None:
    trainer = trainer_of(ROWS["chats"], tmp_path, assistant_only_loss=True)
    tokenizer = trainer.processing_class
    (batch,) = trainer.get_eval_dataloader()
    said = [int(t) for t in batch["labels"][0] if t != -100]
    assert tokenizer.decode(said, [12.0 if t == tokenizer.num_token_id else 0.0 for t in said]).startswith(
        "milk costs 12"
    )
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert torch.equal(batch["input_ids"][0], tokenizer(text, return_tensors="pt")["input_ids"][0])


def test_a_stock_trainer_is_told_what_to_use(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = tiny_pair()
    arguments = SFTConfig(str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True)
    data, own = Dataset.from_list(ROWS["texts"]), CausalQwenTokenizer.of(tokenizer)
    trainer = SFTTrainer(model, arguments, processing_class=own, train_dataset=data)
    with pytest.raises(UserError, match=r"CausalQwenSFTTrainer, or a folder exported --as-base"):
        trainer.train()
