"""New words for a trained model, each in a spare row: one-vs-rest learns a word alone (S4 3.3.1).

The loss of word k has no other word's row: the cross entropies of P_k = P(W_k U' + b_k > C_k), at fixed U'. P_k
depends on the direction of (W_k, b_k - C_k) alone, so C_k and the size of W_k are other words'.
"""

import copy
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.data.tokenizer import PLACEHOLDER, NumericalAwareTokenizer
from cqwen_dist.generate.continuation import padded
from cqwen_dist.generate.decisions import inferred
from cqwen_dist.heads.precision import at_hand
from cqwen_dist.model.ridge import ridges_by_leave_one_out
from cqwen_dist.ops.cauchy import Cauchy, log_prob_above

ROWS = 16  # texts in a batch
STEPS = 100  # of L-BFGS, at most
HOLD = 1.0  # nats for each position where the word comes, if W_k leaves its start by its own length


@torch.no_grad()
def add_words(model: Any, tokenizer: Any, words: Mapping[str, Sequence[str]], others: Sequence[str] = ()) -> Any:
    """Give each new word a spare row of the model, in place; returns a tokenizer with each as one token.

    words: for each, such as " refund", prompts after which it comes. others: texts after which none comes. Within a
    text a word comes where the text has it. model, tokenizer: of `load`; all V rows are here, so ranks do not matter.
    The input row is the mean of those that spelt the word; W_k and b_k are fitted, in float64 on the CPU. Beside these
    only `used_rows` changes. Raises `UserError`.
    """
    now = NumericalAwareTokenizer(tokenizer.tokenizer, tokenizer.num_token_id, policy=tokenizer.policy)
    spelt, plain = _spellings(now, words), with_number_token(now.tokenizer, now.num_token_id)
    # Within other letters, as in "nonrefundable", a word is none; a space before it ends these
    marks = [AddedToken(word, normalized=False, special=False, single_word=word[0].isalnum()) for word in spelt]
    plain.add_tokens(marks)
    found = NumericalAwareTokenizer(plain, now.num_token_id, policy=now.policy)
    first, action, table = int(model.config.used_rows), model.model.action, model.get_input_embeddings().weight
    rows, spare = [plain.convert_tokens_to_ids(word) for word in spelt], model.config.vocab_size - first
    if not 0 < len(rows) <= spare:
        raise UserError("words", Said(f"{len(rows)} words"), f"at least 1, at most {spare}: the rows that are spare")
    if rows[0] != first:
        raise UserError("tokenizer", Said(f"row {rows[0]} for the next word"), f"the model's own, where it is {first}")
    if table.is_meta or action.cls_weight.is_meta:
        raise UserError("model", Said("offloaded weights"), "a model that is loaded to a device")
    for row, ids in zip(rows, spelt.values(), strict=True):
        table[row] = table[ids].float().mean(0).to(table.dtype)
    u, after = _read(model, found, dict(zip(rows, words.values(), strict=True)), others)
    size = action.cls_weight[:first].norm(dim=1).median().double().cpu()
    threshold = action.threshold[:first].median()
    for row in rows:
        weight, bias = fitted_row(u, torch.tensor([row in follow for follow in after]))
        action.cls_weight[row] = (weight * size).to(action.cls_weight)
        action.cls_bias[row] = (bias * size).to(threshold) + threshold
        action.threshold[0 if action.scalar_threshold else row] = threshold
    model.config.used_rows = model.model.config.used_rows = first + len(rows)
    return CausalQwenTokenizer.of(found) if isinstance(tokenizer, CausalQwenTokenizer) else found


def _spellings(tokenizer: NumericalAwareTokenizer, words: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """The tokens that spell each word now; its NFC is the key, as texts are read so. Raises `UserError`."""
    plain, found = tokenizer.tokenizer, dict[str, list[int]]()
    vocabulary = plain.backend_tokenizer.get_vocab(with_added_tokens=False)
    for word, prompts in words.items():
        name = unicodedata.normalize("NFC", word)
        ids = tokenizer.encoder.backend.encode(name, add_special_tokens=False).ids
        begun = "".join(plain.convert_ids_to_tokens(ids))
        longer = next((t for t in vocabulary if t.startswith(begun) and t[len(begun) :][:1].isalpha()), None)
        for fault, allowed in (
            (not name.strip(), "a word with a letter or a sign"),
            (name in found, "each word once"),
            (any(c.isdigit() for c in name), "a word without digits"),
            (any(i in plain.added_tokens_decoder for i in ids), "a word that contains no added or control token"),
            (len(ids) == 1, "a word that is not yet one token"),
            (longer, f"a word with which no token begins, such as {longer}: texts would be read differently"),
            (isinstance(prompts, str) or not prompts, "a list of prompts for each word, one at least"),
        ):
            if fault:
                raise UserError("words", word, allowed)
        found[name] = ids
    return found


def with_number_token(tokenizer: Any, row: int) -> Any:
    """A copy of a transformers tokenizer with <NUM> as a token in its row, unless there is one: the next token that is
    added would take the row. Raises RuntimeError if the tokenizer assigns a different row."""
    plain = copy.deepcopy(tokenizer)
    if row >= (first := max(plain.get_vocab().values()) + 1):
        spare = [AddedToken(f"<unused{i}>", normalized=False) for i in range(first, row)]
        plain.add_tokens([*spare, AddedToken(PLACEHOLDER, normalized=False, special=False)])
        if plain.convert_tokens_to_ids(PLACEHOLDER) != row:
            raise RuntimeError(f"the tokenizer gives <NUM> another row than {row}")
    return plain


def _read(
    model: Any, tokenizer: Any, taught: Mapping[int, Sequence[str]], others: Sequence[str]
) -> tuple[Cauchy, list[set[int]]]:
    """(words' part of U' [N,C_w] float64 on the CPU, rows that come next) at all positions of texts. taught: by row."""
    ends: dict[str, set[int]] = {text: set() for text in others}  # several words may come after one text
    for row, own in taught.items():
        for text in own:
            ends.setdefault(text, set()).add(row)
    if odd := [text for text in ends if not isinstance(text, str)]:
        raise UserError("prompt", odd[0], "a text")
    laws, after, texts = [], [], [(tokenizer.encode(text), rows) for text, rows in ends.items()]
    for start in range(0, len(texts), ROWS):
        part = texts[start : start + ROWS]
        batch = padded(model, tokenizer, [text for text, _ in part])
        u = inferred(model, batch, batch.mask.flatten().nonzero()[:, 0])
        with at_hand(action := model.model.action):
            law = action.word_part(action.add_noise(u))
        laws.append([side.double().cpu() for side in law])
        after += [follow for (ids, _), rows in part for follow in (*({row} for row in ids[1:]), rows)]
    return Cauchy(*map(torch.cat, zip(*laws, strict=True))), after


def fitted_row(u: Cauchy, comes: Tensor, hold: float = HOLD) -> tuple[Tensor, Tensor]:
    """(W [C] of length 1, b - C) of a word that comes after the positions `comes` [N] bool, and nowhere else.

    u: U' [N,C] float64. L-BFGS lowers the loss, plus hold |W - start|^2 for each position where the word comes. The
    start is the ridge regression of `comes` on loc_U. Raises `UserError` if there is none.
    """
    start = ridges_by_leave_one_out(u.loc, comes.double()[:, None])[0][0]
    if not start.any():
        raise UserError("words", Said("prompts that differ from no other text"), "further prompts and others")
    start /= start.norm()
    middle = -start @ (u.loc[comes].mean(0) + u.loc[~comes].mean(0)) / 2
    weight, bias = start.clone().requires_grad_(), middle.requires_grad_()
    search = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> float:
        search.zero_grad()
        score = u.affine(weight, bias)
        gap = torch.where(comes, -score.loc, score.loc)
        total = -log_prob_above(score.scale, gap).sum() + hold * comes.sum() * (weight - start).square().sum()
        total.backward()
        return float(total.detach())

    with torch.enable_grad():
        search.step(loss)
    size = weight.detach().norm()
    return weight.detach() / size, bias.detach() / size
