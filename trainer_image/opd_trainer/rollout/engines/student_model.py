"""Loading the student for rollouts: the model, its end tokens, and new weights in place."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_student(folder: Path, *, dtype: str, device: str, trust_remote_code: bool) -> Any:
    """The model in evaluation mode. Raises OSError when the folder cannot be read."""
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
    return model.to(device).eval().requires_grad_(False)


def end_tokens(folder: str | Path, *, trust_remote_code: bool = False) -> frozenset[int]:
    """Ids that end a response: from the folder's generation config where that names some, else from its config."""
    for kind in (GenerationConfig, AutoConfig):
        options = {} if kind is GenerationConfig else {"trust_remote_code": trust_remote_code}
        try:
            ids = kind.from_pretrained(folder, **options).eos_token_id
        except OSError:
            continue
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def embedding_rows(source: str | Path, *, trust_remote_code: bool) -> int:
    """Size of the vocabulary: ids from here on are illegal. Raises OSError or ValueError."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
    return int(config.vocab_size)


def load_weights(model: Any, folder: Path) -> None:
    """Copy a published folder into the model in place.

    Raises OSError when the folder holds no weights and ValueError when they are not this model's.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise OSError(f"{folder} holds no safetensors")
    state = model.state_dict(keep_vars=True)
    seen: set[int] = set()
    unknown: list[str] = []
    with torch.no_grad():
        for file in files:
            for name, tensor in load_file(file).items():
                target = state.get(name)
                if target is None or target.shape != tensor.shape:
                    unknown.append(name)
                    continue
                target.copy_(tensor)
                seen.add(target.data_ptr())
    missing = [name for name, value in state.items() if value.data_ptr() not in seen and value.numel()]
    if unknown or missing:
        raise ValueError(
            f"{folder} does not fit the model: {len(unknown)} tensors unknown or misshapen ({', '.join(unknown[:3])}),"
            f" {len(missing)} missing ({', '.join(missing[:3])})"
        )
