"""`damage.py DATA`: DATA/models/pruned, the teacher without some of its layers and with noise, which heals in more steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from recipe import DROPPED_LAYERS, NOISE, ROOT, Folders
from transformers import AutoModelForCausalLM, AutoTokenizer


def make_pruned(teacher: Path, out: Path) -> None:
    """The teacher without DROPPED_LAYERS, and with NOISE times each matrix's standard deviation; the same every time."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    kept = [layer for index, layer in enumerate(model.model.layers) if index not in DROPPED_LAYERS]
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * NOISE)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(out)


def main() -> None:
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples/quickstart/prepare.py")
    assert spec is not None
    assert spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    folders = Folders(Path(sys.argv[1]))
    quickstart.once(folders.student_of("pruned"), make_pruned, folders.teacher)


if __name__ == "__main__":
    main()
