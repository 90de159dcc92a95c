"""Initial values of the heads: rows and scales, by preset or from data (seeds S3 section 4, S1).

At each start loc_S = W_Qwen z, so softmax(loc_S) is the distribution of the base on text without numbers. The starts
differ in threshold C and total scale gamma of U'. Presets use the seeds' constants; the calibrated start
(`model.calibration`) chooses both from data.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.model.embedding import NumericalAwareEmbedding, scale_of
from cqwen_dist.model.modules import CausalModules
from cqwen_dist.ops.ovr.head import WordHead

SEED_GAMMA = math.log1p(math.e)  # softplus(1.0) = 1.3133 (S3 4 step 2)
SEED_NOISE = 0.1  # not 0 as in the seeds: |b| has no gradient at 0, so b_noise would never train
# |w_num| relative to the mean norm of the digits' rows. On SmolLM2 (GSM8K) the base's accuracy changes by less than
# 0.2 points for 0 to 0.08; 0.2 costs 0.3 points.
VALUE_SHARE = 0.08
NOISE = 0.5  # share of a number's scale
PRESET_THRESHOLD = {"seed": 0.0, "seed-100": 100.0, "calibrated": 0.0}


@torch.no_grad()
def inherit_head(
    heads: CausalModules,
    weight: Any,
    bias: Tensor | None,
    *,
    num_row_init: str = "inherit",
    num_bias_init: float = 0.0,
    reg_gain: float = 1.0,
) -> None:
    """Copy the base's output head [V,H] into W_cls, and set W_loc to match; start W_reg.

    Word part C_w = H: W_loc = I, W_cls = W. C_w > H: zero-padded, loc_S unchanged. C_w < H: the top C_w right singular
    directions of W. Number dimensions: none in W_cls, zero in W_loc, 1/m in W_reg: words do not see them.
    weight: a tensor, or a slice object of a safetensors file. bias: the base head's, or None (Qwen has none): b_cls.
    num_row_init: "small": <NUM>'s row is small and random (S1 4.1.2 has 0); else it is inherited.
    num_bias_init: added to its bias. reg_gain: a factor on the words' part of W_reg's Xavier start (S1 5 has 0.1).
    """
    config, action, abduction = heads.config, heads.action, heads.abduction
    words, hidden = config.causal_size, config.hidden_size
    rows = slice(action.vocab_start, action.vocab_start + action.rows)
    shared = min(words, hidden)

    # W_cls and W_loc
    action.cls_weight.zero_()
    abduction.loc_net.weight[shared:].zero_()
    if words >= hidden:
        action.cls_weight[:, :hidden] = weight[rows].to(action.cls_weight)
    else:
        whole = weight[:].double()
        gram = whole.T @ whole
        energies, vectors = torch.linalg.eigh(gram)  # ascending
        action.projection_error = math.sqrt(float(energies[: hidden - words].clamp(min=0).sum() / energies.sum()))
        kept = None if bias is None else bias[rows].detach().float()
        action.base_head = WordHead.of(weight[rows].float(), kept, 0.0, action.vocab_start, action.vocab_size)
        top = vectors[:, hidden - words :]
        action.cls_weight[:, :words] = (whole[rows] @ top).to(action.cls_weight)
        abduction.loc_net.weight[:words] = top.T.to(abduction.loc_net.weight)
    if bias is not None:
        action.cls_bias.copy_(bias[rows])

    action.number_head.inherit(reg_gain)

    # The <NUM> row, on the rank that has it
    row = config.num_token_id - action.vocab_start
    if 0 <= row < action.rows:
        action.base_row = [action.cls_weight[row].clone(), action.cls_bias[row].clone()]
        if num_row_init == "small":
            # A zero row would give scale_S 0, P 0 or 1, and an infinite gradient
            with torch.random.fork_rng(devices=[]):  # only this rank draws
                torch.nn.init.normal_(action.cls_weight[row, :shared], std=0.1 * float(weight[:].float().std()))
        action.cls_bias[row] += num_bias_init


@torch.no_grad()
def find_numeral_row(embedding: NumericalAwareEmbedding, table: Any, numerals: Sequence[int]) -> float:
    """Make the mean row of the tokens with which the base spells numerals the row of <NUM> that the base reads.

    table [V,H]: the base's token table, a tensor or a lazy file slice. `numeral_row` becomes this mean minus the table
    row of <NUM>. Returns the mean norm of the numeral rows.
    """
    num = embedding.num_token_id
    assert num is not None
    rows = torch.cat([table[word : word + 1] for word in numerals]).detach().float()
    own = table[num : num + 1].detach().float()[0]
    scale = scale_of(embedding.token_embedding)
    embedding.numeral_row = scale * (rows.mean(0) - own)
    return scale * float(rows.norm(dim=1).mean())


@torch.no_grad()
def set_scales(heads: CausalModules, scale: float, noise: float) -> None:
    """Set scale_U and |b_noise| on word dimensions; their sum is the total scale of U'."""
    words = heads.config.causal_size
    heads.config.scale_floor = heads.abduction.scale_floor = min(1e-6, (scale + noise) * 1e-3)
    heads.abduction.set_scale(scale, 0, words)
    heads.action.b_noise[:words] = noise


@torch.no_grad()
def set_number_scale(heads: CausalModules, scale: float, noise: float = NOISE) -> None:
    """Set the total scale of U' on number dimensions; `noise` is the fraction of b_noise in it. If W_reg is 0 on words,
    this is scale_Y.

    scale_U is at least twice the floor, as an exact regression would leave a scale of 0.
    """
    if dims := heads.config.number_dims:
        heads.abduction.set_scale(max((1 - noise) * scale, 2 * heads.abduction.scale_floor), -dims)
        heads.action.b_noise[-dims:] = noise * scale


@torch.no_grad()
def start_regression(
    heads: CausalModules, coefficients: Tensor, intercept: float, scale: float, noise: float = NOISE
) -> None:
    """Make Y = coefficients . z + intercept with this Cauchy scale, in the target's unit.

    coefficients: with number dimensions [H], their rows of W_loc, and W_reg's words' part is 0; else [C_w], W_reg
    itself, and the scale follows from the words' scales. If the head has several values or types, all start equal.
    noise: as `set_number_scale`.
    """
    heads.action.number_head.start(coefficients, intercept)
    if heads.config.number_dims:
        heads.abduction.loc_net.weight[heads.config.causal_size :] = coefficients.to(heads.abduction.loc_net.weight)
        set_number_scale(heads, scale, noise)


@torch.no_grad()
def apply_preset(heads: CausalModules, start: str, b_noise_init: float | None = None) -> None:
    """Set the seeds' constants: scale_U = softplus(1), C = 0 or 100 (`calibrated`: 0, until it is run)."""
    set_scales(heads, SEED_GAMMA, SEED_NOISE if b_noise_init is None else b_noise_init)
    set_number_scale(heads, 1.0)
    heads.action.threshold.fill_(PRESET_THRESHOLD[start])


@torch.no_grad()
def start_at_data(heads: CausalModules, median: Tensor, scale: float) -> None:
    """Begin with Y ~ Cauchy(about median, scale) at every input, in the target's unit (S1 4.2).

    S1 sets W_reg to 0 and has a bias for the scale. Here |W_reg| makes the scale: W_reg keeps its Xavier directions.
    """
    nowhere = torch.zeros(1, heads.config.feature_size, device=heads.action.b_noise.device)
    u_prime = heads.action.add_noise(heads.abduction(nowhere))  # W_scale is 0: the same scales everywhere
    heads.action.number_head.centre(median)
    heads.action.number_head.widen(scale, u_prime.scale[0])
