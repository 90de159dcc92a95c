"""Packed texts without a mask: loss and every gradient as of each text alone, whatever is done to the layers."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.numerics import any_order, assert_all_close, assert_close, gradients, relative_error
from support.ranks import Pool
from support.tiny import CONTEXT, NUM, tiny_model
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers.masking_utils import sdpa_mask

from cqwen_dist.batch import Batch, Texts
from cqwen_dist.config import LoraConfig
from cqwen_dist.config.architectures import ARCHITECTURES
from cqwen_dist.config.trainable import is_lora_b
from cqwen_dist.data.collate import collate
from cqwen_dist.data.store import Document, Sample
from cqwen_dist.heads.fused_loss import LossOptions, TokenLabels, fused_loss
from cqwen_dist.model import CausalQwenModel, varlen
from cqwen_dist.model.layers import compile_layers
from cqwen_dist.model.varlen import _even, _within, attend_within_texts, kernel_for
from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.mappings import over_sequence
from cqwen_dist.training.zero.patches import join_deepspeed

ROWS = ((7, 1, 5), (11, 1, 3), (15,))  # tokens of each row's texts: padding of 3, 1 and (in its own text) 1 behind


def document(length: int, seed: int) -> Document:
    """Random words; a fifth are numbers to learn."""
    draw = np.random.RandomState(seed)
    numbers = draw.rand(length) < 0.2
    ids = np.where(numbers, NUM, draw.randint(0, NUM, length)).astype(np.int32)
    return Document(ids, np.where(numbers, draw.randn(length) * 9, 0.0), numbers)


def samples(rows: tuple[tuple[int, ...], ...] = ROWS) -> list[Sample]:
    return [tuple(document(n, 10 * i + j) for j, n in enumerate(row)) for i, row in enumerate(rows)]


def batch_of(rows: list[Sample], parts: int = 1) -> Batch:
    return collate(rows, pad_token_id=NUM + 1, num_token_id=NUM, parts=parts)


def model_of(kind: str, *, within: bool, checkpointing: str = "") -> CausalQwenModel:
    """With adapters that matter, and every parameter learning."""
    model = tiny_model(kind, number_dims=3, lora=LoraConfig(r=2).model_dump())
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_lora_b(name) or name.startswith(("abduction", "action")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if checkpointing:
        model.train()
        model.transformer.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})  # type: ignore
    if within:
        attend_within_texts(model.transformer)
    return model.requires_grad_(True)


def counts(batches: list[Batch]) -> tuple[int, int]:
    return sum(int(b.label_mask.sum()) for b in batches), sum(int(b.numeric_mask.sum()) for b in batches)


def trained(
    model: CausalQwenModel, batches: list[Batch], of: tuple[int, int] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss over all batches, divided by their counts together (or by `of`), and the gradient of every parameter."""
    words, numbers = of or counts(batches)
    total = torch.zeros(())
    for batch in batches:
        keep = batch.kept
        labels = TokenLabels(batch.labels.flatten()[keep], model.action.number_head.labels(batch, keep))
        u = model.abduction(model.kept_features(batch, keep))
        weights = {"token_weight": 1 / words, "number_weight": 1 / numbers}
        total = total + fused_loss(model.action, u, labels, LossOptions(NUM), **weights).loss
    total.backward()
    return total.detach(), gradients(model)


@pytest.mark.parametrize("kind", [name for name, base in ARCHITECTURES.items() if base.capabilities.packing.note == ""])
def test_loss_and_gradients_equal_each_text_alone_and_the_mask(kind: str) -> None:
    """fp32, relative to a tensor's largest entry: the products have other shapes. 1e-5 of the loss, 1e-4 of gradients:
    the regression's bias has one of opposite terms that leave a thousandth. Mistral's window is 5."""
    alone = [batch_of([(text,)]) for row in samples() for text in row if len(text.ids) > 1]
    loss, wanted = trained(model_of(kind, within=False), alone)
    assert len(wanted) == len(list(model_of(kind, within=False).parameters())), "a parameter has no gradient"
    for within in (True, False):
        found, grads = trained(model_of(kind, within=within), [batch_of(samples())])
        assert_close(found, loss, 1e-5, "loss")
        assert_all_close(grads, wanted, 1e-4)


def test_no_mask_is_made_for_packed_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = batch_of(samples()), model_of("qwen2", within=True)
    made = []
    monkeypatch.setattr(varlen, "sdpa_mask", lambda *args, **given: made.append(sdpa_mask(*args, **given)) or made[-1])
    attend_within_texts(model.transformer)
    z = model.kept_features(batch, batch.kept)
    assert not made, "a mask was made though the batch names its texts"
    whole = model.features(batch.input_ids, batch.numeric_values, None, batch.position_ids)
    assert made[0].shape == (3, 1, 16, 16)
    assert_close(whole.flatten(0, 1)[batch.kept], z, 1e-5, "z")
    positions = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    mixed = model.features(batch.input_ids, batch.numeric_values, None, positions)
    assert relative_error(mixed.flatten(0, 1)[batch.kept], z) > 1e-2, "texts that see each other must differ"


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
@pytest.mark.parametrize("how", ["reentrant", "plain"])
def test_checkpointed_layers_know_the_texts_in_backward(kind: str, how: str) -> None:
    batch = batch_of(samples())
    loss, wanted = trained(model_of(kind, within=True), [batch])
    again, grads = trained(model_of(kind, within=True, checkpointing=how), [batch])
    assert torch.equal(again, loss)
    assert_all_close(grads, wanted, 1e-6)


def test_compiled_layers_are_compiled_once_for_batches_of_any_texts() -> None:
    counter = CompileCounter()
    torch._dynamo.reset()
    plain, compiled = model_of("qwen3", within=True), model_of("qwen3", within=True)
    compile_layers(compiled.transformer.layers, backend=counter)
    frames = []
    for seed in range(4):
        draw = np.random.RandomState(seed)
        lengths = tuple(draw.randint(1, 8, draw.randint(3, 8)))
        batch = batch_of(samples((lengths, (CONTEXT,))))
        found, wanted = trained(compiled, [batch]), trained(plain, [batch])
        assert_close(found[0], wanted[0], 1e-5, "loss")
        assert_all_close(found[1], wanted[1], 1e-4)
        frames.append(counter.frame_count)
    assert frames[-1] == frames[0] > 0, f"compiled anew for other lengths: {frames}"


LONG = (((9, 1, 20), (31,)), ((40,),), ((2,), (13,), (5,)))  # batches; the text of 2 is shorter than a group of 4


def split_over(kind: str, sequence: int, checkpointing: str) -> tuple[Tensor, dict[str, Tensor]]:
    """On this rank: the parts of every batch that its sequence group takes; sums over all ranks."""
    join_deepspeed()
    groups = build_groups(1, None, sequence)
    model = model_of(kind, within=True, checkpointing=checkpointing)
    if groups.sequence is not None:
        model.features.backbone.spread = over_sequence(groups.sequence)
    reading = groups.reading
    whole = [batch_of(samples(rows), sequence) for rows in LONG]
    mine = [batch.part(reading["part"], reading["parts"]) for batch in whole[reading["rank"] :: reading["world"]]]
    loss, grads = trained(model, mine, counts(whole))
    return sum_over(loss), {
        name: sum_over(grads.get(name, torch.zeros_like(p))) for name, p in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("world", "sequence", "kind", "checkpointing"),
    [
        *(
            (2, 2, kind, "")
            for kind, base in ARCHITECTURES.items()
            if base.capabilities.sequence_groups.level != "unsupported"
        ),
        (4, 2, "qwen3", "plain"),
        (4, 4, "qwen2", "plain"),
        (4, 4, "llama", ""),
    ],
)
def test_texts_split_over_ranks_have_the_loss_and_gradients_of_one_rank(
    pool: Pool, world: int, sequence: int, kind: str, checkpointing: str
) -> None:
    """Packed and not, unequal lengths, with a window (mistral). Two key heads: a group of 4 repeats them. 1e-5 as in
    the products of other shapes; the regression's bias, as above, leaves a thousandth of its terms."""
    loss, wanted = trained(model_of(kind, within=True), [batch_of(samples(rows)) for rows in LONG])
    for found, grads in pool(split_over, world, kind, sequence, checkpointing):
        assert_close(found, loss, 1e-5, "loss")
        bias = "action.reg_bias"
        assert_close(grads.pop(bias), wanted[bias], 1e-4, bias)
        assert_all_close(grads, {name: value for name, value in wanted.items() if name != bias}, 1e-5)


def given(dtype: torch.dtype = torch.float32, device: str = "cpu", heads: int = 6, width: int = 8) -> list[Tensor]:
    """q, k, v of 40 positions, two key heads, that require gradients."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(40, count, width, generator=draw).to(device, dtype).requires_grad_() for count in (heads, 2, 2)]


def texts(device: str = "cpu") -> Texts:
    lengths = [17, 1, 13, 9]
    return Texts(lengths, 17, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device))


def by_formula(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """softmax(q k / sqrt(D)) v in float64, of one text: a token sees `window` tokens, itself among them."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) / q.shape[-1] ** 0.5
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (back >= 0) & (back < (window or len(q)))
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 4])
def test_attention_equals_the_formula_with_shared_key_heads_and_a_window(window: int | None) -> None:
    q, k, v = given()
    parts = zip(q.split(texts().lengths), k.split(texts().lengths), v.split(texts().lengths), strict=True)
    wanted = torch.cat([by_formula(*part, window) for part in parts])
    found = _within(q, k, v, texts(), 8**-0.5, 0.0, window)
    assert_close(found, wanted, any_order(40), "attention")  # positions
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), (q, k, v)),
        torch.autograd.grad(wanted.square().sum(), (q, k, v)),
        strict=True,
    ):
        assert_close(one, other, any_order(40), "gradient")


@pytest.fixture
def on_ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the GPU ran FlashAttention-2."""
    monkeypatch.setattr(varlen, "_has_flash", lambda: True)
    varlen._kernel.cache_clear()
    yield
    varlen._kernel.cache_clear()


def test_this_torchs_kernel_accepts_the_arguments_and_has_a_gradient(on_ampere: None) -> None:
    """By its shapes alone: the meta device runs what the kernel says of itself."""
    for window in (None, 4):
        q, k, v = (x.detach().to("meta", torch.bfloat16).requires_grad_() for x in given())
        kernel = kernel_for(torch.bfloat16, 8, window)
        assert kernel is not None
        out = kernel(q, k, v, texts("meta").begin, 17, 8**-0.5)
        out.sum().backward()
        assert out.shape == q.shape
        assert [x.grad.shape for x in (q, k, v) if x.grad is not None] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 8), (torch.bfloat16, 6), (torch.bfloat16, 264)])
def test_unsupported_inputs_run_text_by_text(dtype: torch.dtype, width: int, on_ampere: None) -> None:
    assert kernel_for(dtype, width, None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("heads", "width"), [(2, 64), (6, 64), (14, 128)])
def test_varlen_kernel_on_a_gpu(window: int | None, heads: int, width: int) -> None:
    """bf16: no further from the formula in float64 than text by text in bf16 is, plus bf16's rounding of the result."""
    q, k, v = given(heads=heads, width=width)
    parts = zip(q.split(texts().lengths), k.split(texts().lengths), v.split(texts().lengths), strict=True)
    wanted = torch.cat([by_formula(*part, window) for part in parts])
    slopes = torch.autograd.grad(wanted.square().sum(), (q, k, v))
    assert kernel_for(torch.bfloat16, width, window) is not None, "this GPU and this torch have no kernel"
    on_gpu = [x.detach().cuda().bfloat16().requires_grad_() for x in (q, k, v)]
    scale = width**-0.5
    found = _within(*on_gpu, texts("cuda"), scale, 0.0, window)
    grads = torch.autograd.grad(found.float().square().sum(), on_gpu)
    split = zip(*(x.split(texts().lengths) for x in on_gpu), strict=True)
    plain = torch.cat([_even(*part, len(part[0]), scale, 0.0, window) for part in split])
    plain_grads = torch.autograd.grad(plain.float().square().sum(), on_gpu)
    pairs = zip((found, *grads), (plain, *plain_grads), (wanted, *slopes), strict=True)
    for one, other, exact in pairs:
        assert relative_error(one.cpu(), exact) <= relative_error(other.cpu(), exact) + 2**-7
