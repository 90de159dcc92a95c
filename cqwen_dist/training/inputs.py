"""The inputs of a run: ranks agree on them before they train, and the base is built if the config describes one.

On a cluster a config is edited between two starts, a checkout lies on a node's own disk, or a mount is stale. Ranks
whose inputs differ in value but not in shape would train together without an error, on a loss that no config describes.
So a rank with a different config, data or code is refused by name.
"""

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import cqwen_dist
from cqwen_dist.checkpoint import adapter
from cqwen_dist.checkpoint.manifest import resolve_checkpoint
from cqwen_dist.checkpoint.resume import KEYS, base_digest
from cqwen_dist.config import TRAIN_TOKENIZER, Config, DataConfig, Said, UserError, flat
from cqwen_dist.config.custom import source_of
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.load import Datasets, is_prepared, load_datasets, read_watched, tokenizer_of
from cqwen_dist.data.loader import Loader
from cqwen_dist.data.prepare import tokenise
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_split
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.base_loading import base_folder_of, build_base
from cqwen_dist.parallel.collectives import UNSEEN, Facts, agree, first_of_host, main_rank_first
from cqwen_dist.parallel.runtime import find_ranks
from cqwen_dist.run.files import DIGESTS, MANIFEST, appearing, file_record, versions


def refuse_accelerate(config: Config, env: Mapping[str, str]) -> None:
    """Raises `UserError` for a setting of `accelerate launch` (its variables ACCELERATE_*) that the config contradicts.

    What it says if nobody asked (mixed precision "no", 1 accumulated batch) contradicts nothing.
    """
    train, parallel, world = config.train, config.parallel, find_ranks(env)[1]
    micro_batches = train.global_batch_size * parallel.sequence_group_size / (train.micro_batch_size * world)
    offload = "cpu" if parallel.offload == "optimizer" else "none"
    norm = "none" if train.max_grad_norm is None else str(train.max_grad_norm)
    held = {
        "DEEPSPEED_ZERO_STAGE": ("parallel.zero_stage", {str(parallel.zero_stage)}),
        "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("parallel.offload", {offload}),
        "DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("parallel.zero_stage 3", {"none"}),
        "DEEPSPEED_CONFIG_FILE": ("the run's config", {"none"}),
        "MIXED_PRECISION": ("train.precision", {train.precision, "no"}),
        "GRADIENT_CLIPPING": ("train.max_grad_norm", {norm, norm.removesuffix(".0"), "none"}),
        "GRADIENT_ACCUMULATION_STEPS": ("train.global_batch_size", {f"{micro_batches:g}", "1"}),
        "DYNAMO_BACKEND": ("model.compile_layers", {"no"}),
        **{f"USE_{name}": ("parallel", {"false"}) for name in ("FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")},
    }
    for name, (key, same) in held.items():
        if (found := env.get(f"ACCELERATE_{name}", min(same))).lower() not in same:
            raise UserError(f"ACCELERATE_{name}", found, f"{' or '.join(sorted(same))} in accelerate; {key} decides")
    cpu = env.get("ACCELERATE_USE_CPU")  # set where accelerate starts a single process
    if cpu is not None and "MASTER_ADDR" in env and "RANK" not in env:
        raise UserError("num_processes", Said("accelerate started one process instead"), "--multi_gpu, on CPUs too")
    if cpu == "True" and torch.cuda.is_available() and env.get("DS_ACCELERATOR") != "cpu":
        raise UserError("ACCELERATE_USE_CPU", cpu, "False, or DS_ACCELERATOR=cpu with it")


def config_facts(config: Config) -> Facts:
    """The resolved config, the package's code, the versions below it, and the modules that the config names."""
    package = Path(cqwen_dist.__file__).parent
    code = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        code.update(f"{file.relative_to(package)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    facts = {key: repr(value) for key, value in flat(config.model_dump(mode="json")).items()}
    facts |= {f"package {name}": version for name, version in versions().items()}
    facts["code of cqwen_dist"] = code.hexdigest()  # a commit's name would miss edits that are not committed
    for key in ("model.abduction", "model.number_head", "loss.gate"):
        section, name = key.split(".")
        if (source := source_of(getattr(getattr(config, section), name))) is not None:
            facts[f"{key} (code)"] = _digest_of([source])
    return facts


def read_tokenizer(config: Config, resume_from: Path | None, job: Path) -> tuple[NumericalAwareTokenizer, Facts]:
    """The tokenizer, once all ranks have the same one and begin with the same weights. Raises `UserError`.

    job: the folder of the first run of this process, which remembers digests.
    """
    memo = job / DIGESTS if first_of_host() else None

    def read() -> tuple[NumericalAwareTokenizer, Facts]:
        tokenizer = tokenizer_of(config)
        # The weights that the run begins with; without a memo, another rank of this host reads large files
        facts = {"run.resume": "none" if resume_from is None else _digest_of([resume_from / MANIFEST])}
        facts[KEYS["base"]] = UNSEEN if memo is None else base_digest(base_folder_of(config.base_folder), memo)
        if config.model.warm_start is not None and memo is None:
            facts["model.warm_start"] = UNSEEN  # resolving it verifies all of its files
        elif config.model.warm_start is not None:
            source = Path(config.model.warm_start).expanduser()
            if (source / adapter.CONFIG).is_file():
                files = sorted(source.glob("adapter_*"))
            else:
                files = [resolve_checkpoint(source, "model.warm_start")[1] / MANIFEST]
            facts["model.warm_start"] = _digest_of(files)
        # Data in memory and prepared data are read by other collectives, so ranks also agree on the choice
        return tokenizer, facts | {KEYS["tokenizer"]: tokenizer.digest(), KEYS["data"]: str(is_prepared(config.data))}

    return agree(read)


def read_texts(
    config: DataConfig, tokenizer: NumericalAwareTokenizer
) -> tuple[tuple[Datasets, dict[str, TextDataset]], Facts]:
    """The run's datasets and its watched ones by name, once all ranks have the same samples. Raises `UserError`."""

    def read() -> tuple[tuple[Datasets, dict[str, TextDataset]], Facts]:
        datasets, watched = load_datasets(config, tokenizer, main_rank_first), read_watched(config, tokenizer)
        held_out = "" if datasets.eval is None else datasets.eval.digest()
        facts = {KEYS["data"]: datasets.train.digest(), KEYS["eval"]: held_out}
        facts |= {f"data.watch.{name}": dataset.digest() for name, dataset in watched.items()}
        return (datasets, watched), facts

    return agree(read)


def _digest_of(files: list[Path]) -> str:
    return hashlib.sha256("".join(str(file_record(file)["sha256"]) for file in files).encode()).hexdigest()


def build_run_base(config: Config, say: Callable[[str], None], device: torch.device, job: Path) -> None:
    """Build (and pretrain) the base of a config with `architecture`, unless the run folder has it.

    job: the folder of the first run of this process, whose base all runs copy. Call it in one process. The folder
    appears atomically. Deterministic on a CPU. Raises `UserError`.
    """
    architecture = config.model.architecture
    folder = Path(config.base_folder)
    if architecture is None or folder.is_dir():
        return
    if config.model.tokenizer is None:
        allowed = "a tokenizer's folder or hub name, or `train` to build one from the data"
        raise UserError("model.tokenizer", "no value", allowed)
    if (built := job / folder.name).is_dir():
        with appearing(folder, "run.dir") as partial:
            shutil.copytree(built, partial, dirs_exist_ok=True)
        return
    base: Any = build_base(architecture, config.train.seed)
    reads = config.model.tokenizer == TRAIN_TOKENIZER or config.model.pretrain is not None
    texts = read_split(config.data, ReadReport())[0] if reads else []
    vocab_size, tokenizer = base.config.vocab_size, tokenizer_of(config, texts)
    if tokenizer.rows_for(vocab_size) > vocab_size:
        raise UserError("model.architecture.vocab_size", vocab_size, f"{tokenizer.num_token_id + 1} or more, for <NUM>")
    if config.model.pretrain is not None:
        dataset = tokenise(texts, tokenizer, config.data)
        _pretrain(base.to(device), dataset, config.model.pretrain.steps, config.train.seed, say)
        base.cpu()
    base.config.eos_token_id = base.generation_config.eos_token_id = tokenizer.eos_token_id  # ends generation
    with appearing(folder, "run.dir") as partial:
        if config.model.tokenizer == TRAIN_TOKENIZER:
            tokenizer.save_pretrained(partial)
        base.save_pretrained(partial)


def _pretrain(base: Any, dataset: TextDataset, steps: int, seed: int, say: Callable[[str], None]) -> None:
    """Train in place by next-token cross-entropy on ids, on the base's device; bf16 autocast on CUDA.

    base: a causal language model of transformers in fp32. Values of numbers are not used.
    """
    device = next(base.parameters()).device
    loader = Loader(dataset, rank=0, world=1, global_batch_size=32, micro_batch_size=32, seed=seed)
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    say(f"pretraining the tiny base model by cross-entropy: {steps} steps (bounded, once, no stage)")
    began = time.monotonic()
    base.train()
    for step, (cpu_batch,) in zip(range(steps), loader, strict=False):
        batch = cpu_batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = base(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(base.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % max(steps // 4, 1) == 0:
            say(f"  pretraining step {step + 1}/{steps}  loss {float(loss.detach()):.3f}")
    base.eval()
    say(f"  base model ready after {time.monotonic() - began:.0f} s")
