"""Many texts in one call are read as each is alone."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import policies, texts
from support.shared import shared_path

from cqwen_dist.config import NumberPolicy
from cqwen_dist.data import encoder
from cqwen_dist.data.tokenizer import DigitTokenizer, NumericalAwareTokenizer, train_tokenizer

SMALL = NumericalAwareTokenizer(train_tokenizer([f"A patient aged {a}, 价格é {a}元.\n" for a in range(50)], 320))


@settings(max_examples=100)
@given(st.lists(texts | st.text(max_size=20).filter(lambda t: t.isprintable()), max_size=20), policies)
def test_encoding_in_bulk_equals_encoding_one_by_one(some: list[str], policy: NumberPolicy) -> None:
    many = [*some, "", "a \U0010fffe 5", "<NUM> 6", "e\u0301 5\u0338 \u1e9b\u0323"] * 3
    for tokenizer in (
        NumericalAwareTokenizer(SMALL.tokenizer, policy=policy),
        NumericalAwareTokenizer(SMALL.tokenizer, num_token_id=SMALL.text_size + 1, policy=policy),
        DigitTokenizer(SMALL.tokenizer),
    ):
        read = tokenizer.encoder.read([*many, "x" * encoder._LITTLE])[: len(many)]
        assert read == [tokenizer.encoder.read([text])[0] for text in many]


def test_encoding_in_bulk_with_the_real_vocabulary() -> None:
    tokenizer = NumericalAwareTokenizer.from_pretrained(shared_path("tokenizers/qwen2.5"))
    lines = shared_path("data/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()[:300]
    lines += ["价格是99.9元", "l'été coûte 5 €\u0301", "\u1112\u1161\u11ab 7", "ﬁ ½ Å 3", "a\u0327\u0301 10"]
    lines += ["I'LL 'S 've\x1c\x1d \v \f a\r\n\r\n b   \n  c", "x <|im_start|> y", "\x00\x7f 5"]
    assert tokenizer.encoder.read(lines) == [tokenizer.encoder.read([line])[0] for line in lines]
