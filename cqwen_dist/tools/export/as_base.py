"""Convert a CausalQwen to a plain model of its base's class, whose logits are loc_S (mode compatible).

    loc_S = W_cls (W_loc z + b_loc) + b_cls = (W_cls W_loc) z + (W_cls b_loc + b_cls)

The product becomes the output head, so any server can run the model. The remaining bias has no place in these
architectures. The plain model also lacks the scales, the thresholds, the regression (so a `<NUM>` has no value) and
w_num: numbers are read as `<NUM>` with value 0. Rows that were added for `<NUM>` are removed, unless `add_words` used
them. The plain model then has the base's vocabulary and reads numerals as digits.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cqwen_dist.config.architectures import architecture
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.model.embedding import scale_of
from cqwen_dist.model.new_words import with_number_token

OPTION = "--as-base"
HELD = 1e-6  # in logits; a smaller bias is rounding error


@torch.no_grad()
def folded_head(model: CausalQwenForCausalLM) -> tuple[Tensor, Tensor]:
    """Returns W_cls W_loc [V,H] and W_cls b_loc + b_cls [V], fp32.

    Computed in float64, a block of rows at a time to bound memory. Raises `UserError` for a nonlinear abduction
    network.
    """
    net, action = model.model.abduction, model.model.action
    if type(net) is not AbductionNetwork:
        raise UserError(OPTION, Said(f"abduction network {model.config.abduction}"), "the linear one")
    to_words = net.loc_net.weight[: action.word_size].double()
    shift = net.loc_net.bias[: action.word_size].double()
    head = torch.empty(action.rows, to_words.shape[1])
    bias = torch.empty(action.rows)
    for rows in torch.arange(action.rows).split(4096):
        block = action.cls_weight[rows].double()
        head[rows] = (block @ to_words).float()
        bias[rows] = (block @ shift + action.cls_bias[rows].double()).float()
    return head, bias


@torch.no_grad()
def plain_model(model: CausalQwenForCausalLM, drop_bias: bool) -> tuple[PreTrainedModel, Tensor]:
    """Returns the plain model and the bias [V] that it lacks. Shares the backbone's tensors; the model has no adapters.

    V: the base's vocabulary size. Raises `UserError` if the bias exceeds rounding error, unless drop_bias is set.
    """
    architecture(model.config.base["model_type"]).require("plain_export", OPTION, True)
    embedding, num = model.model.features.embedding, model.config.num_token_id
    # Without the rows added for <NUM>, unless words were added behind it
    words = model.config.vocab_size - (model.config.added_rows if model.config.used_rows <= num + 1 else 0)
    head, bias = (part[:words] for part in folded_head(model))
    size = float(bias.abs().max())
    if size > HELD and not drop_bias:
        found = f"a bias of up to {size:.3g} in the logits (std {float(bias.std()):.3g} over the words)"
        allowed = "none, as these models have no place for one; --drop-bias leaves it out (the model card says so)"
        raise UserError(OPTION, Said(found), allowed)
    own = {key: value for key, value in model.config.base.items() if key != "added_rows"}
    config = AutoConfig.for_model(**{**own, "vocab_size": words, "tie_word_embeddings": False})
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    whole = embedding.token_embedding.weight.detach()
    table = copy.deepcopy(embedding.token_embedding)
    table.weight, table.num_embeddings = nn.Parameter(whole[:words].clone(), requires_grad=False), words
    if num < words:
        # Training keeps <NUM>'s row as the base's row plus num_row; a plain embedding needs the sum.
        row = whole[num].float() + embedding.num_row.float() / scale_of(table)
        table.weight[num] = row.to(whole.dtype)
    plain.model = model.model.transformer
    plain.model.embed_tokens = table
    plain.lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
    plain.lm_head.weight = nn.Parameter(head.to(model.dtype), requires_grad=False)
    plain.generation_config = model.generation_config
    return plain.eval(), bias


def plain_tokenizer(tokenizer: Any, words: int, num: int) -> Any:
    """transformers' tokenizer, with `<NUM>` as a visible token if the plain model, of so many words, has its row."""
    return tokenizer if words <= num else with_number_token(tokenizer, num)
