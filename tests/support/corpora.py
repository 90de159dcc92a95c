"""Texts that are hard to read numbers from: numerals of every shape beside whatever makes them ambiguous."""

from hypothesis import strategies as st

from cqwen_dist.config import NumberPolicy
from cqwen_dist.data.numbers import DEFAULT_POLICY, _Scan

_digits = st.text("0123456789", min_size=1, max_size=6)
_numerals = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(-1000, 1000).map(lambda v: f"{v:.2f}"),
    st.integers(10**3, 10**12).map(lambda v: f"{v:,}"),
    st.integers(1, 31).map(lambda v: f"{v:02d}"),
    st.builds("{}.{}".format, _digits, _digits),
    st.builds(".{}".format, _digits),
    st.builds("{}e{}".format, _digits, st.integers(-3, 3)),
    st.sampled_from(
        ["0", "007", "1.0", "2024", "2024.0", "13812345678", "13812345678.0", "555", "１２．５", "1e400", "1,0"]
    ),
    _digits,
)
_characters = list(" .,:;/-+*=%$#()[]\n\t_xXeEa年月日号元是价éΩ×−–－．：，'\"")
_words = ["x", "kg", "st", " -", "--", " 000", "\u00a0000", "(1,234)", "e\u0301", "=\u0338", "v1.2.3", "A4", "0x1F"]
_words += ["192.168.0.1", "T12:30", "(555) ", "+1-", "-123-4567", "<NUM>", "<|endoftext|>"]
_glue = st.sampled_from([*_characters, *_words, *[""] * 8])
_pieces = st.lists(st.one_of(_numerals, _glue, st.text(max_size=3)), max_size=12)

# Any text at all, rich in numerals; no lone surrogates (they are no Unicode text, and `sources` refuses them).
texts = _pieces.map("".join).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))
policies = st.builds(NumberPolicy, **{name: st.booleans() for name in NumberPolicy.model_fields})


def find_left(text: str, policy: NumberPolicy = DEFAULT_POLICY) -> list[tuple[int, int, str]]:
    """What has digits and stays text: (start, end, why)."""
    return _Scan(text, policy).run().left
