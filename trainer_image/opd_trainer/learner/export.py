"""The student as a Hugging Face folder: safetensors, config, generation config, tokenizer; adapters merged."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from opd_api.v1alpha1 import Student
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.learner.models import StudentWithHead, lora_config
from opd_trainer.learner.sharding import whole_tensors

ADAPTER_FOLDER = "adapter"
_ADAPTER = "default"
_PREFIX = "model."


def load_tokenizer(student: Student) -> PreTrainedTokenizerBase:
    """Raises TrainerError(Config, ModelNotFound)."""
    source = student.tokenizer or student.model.source
    revision = None if student.tokenizer else student.model.revision
    try:
        return AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=student.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise TrainerError(
            FailureClass.CONFIG,
            Reason.MODEL_NOT_FOUND,
            f"the tokenizer {source} cannot be loaded: {str(error).splitlines()[0]}; set student.tokenizer",
        ) from error


def gather(student: StudentWithHead, dtype: torch.dtype, *, keep: bool) -> dict[str, Tensor]:
    """The weights on the CPU in `dtype`, named as the base model names them. A collective; only `keep` collects.

    Adapters are merged in the type of the parameters before the cast.
    """
    collected: dict[str, Tensor] = {}
    pending: dict[str, dict[str, Tensor]] = {}
    layers = {name: module for name, module in student.named_modules() if hasattr(module, "lora_A")}
    for name, whole in whole_tensors(student):
        if not keep:
            continue
        owner = next((layer for layer in _parents(name) if layer in layers), None)
        if owner is None:
            collected[name.removeprefix(_PREFIX)] = _cast(whole, dtype)
            continue
        part = name.removeprefix(f"{owner}.")
        if part != "base_layer.weight" and not part.startswith("lora_"):
            collected[f"{owner}.{part.removeprefix('base_layer.')}".removeprefix(_PREFIX)] = _cast(whole, dtype)
            continue
        parts = pending.setdefault(owner, {})
        parts[part] = whole
        if len(parts) == 3:
            collected[f"{owner}.weight".removeprefix(_PREFIX)] = _cast(
                _merged(layers[owner], pending.pop(owner)), dtype
            )
    if keep:
        for name, value in student.state_dict().items():
            if not isinstance(value, DTensor):
                collected.setdefault(name.removeprefix(_PREFIX), value.cpu())
    return collected


def gather_adapter(student: StudentWithHead, *, keep: bool) -> dict[str, Tensor]:
    """The adapters alone, named as peft names them. A collective."""
    return {
        f"base_model.model.{name.removeprefix(_PREFIX).replace(f'.{_ADAPTER}.', '.')}": whole.cpu().clone()
        for name, whole in whole_tensors(student, lambda name: "lora_" in name)
        if keep
    }


def write_model(
    directory: Path, weights: dict[str, Tensor], student: StudentWithHead, dtype: torch.dtype, trust_remote_code: bool
) -> None:
    """safetensors (in shards when large), config.json and generation_config.json."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(
            student.model.config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    if getattr(student.model, "generation_config", None) is not None:
        skeleton.generation_config = student.model.generation_config
    skeleton.save_pretrained(directory, state_dict=weights)


def write_adapter(directory: Path, weights: dict[str, Tensor], student: Student) -> None:
    """A peft folder that loads on the base model."""
    assert student.lora is not None
    directory.mkdir(parents=True, exist_ok=True)
    config = lora_config(student.lora)
    config.base_model_name_or_path = student.model.source
    # "all-linear" is resolved while adapters are injected; the folder must name what was trained.
    config.target_modules = sorted({_module_of(name) for name in weights})
    config.save_pretrained(directory)
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _merged(layer: nn.Module, parts: dict[str, Tensor]) -> Tensor:
    """W + scaling · B A."""
    down, up = parts[f"lora_A.{_ADAPTER}.weight"], parts[f"lora_B.{_ADAPTER}.weight"]
    delta = layer.scaling[_ADAPTER] * (up @ down)
    return parts["base_layer.weight"] + (delta.T if getattr(layer, "fan_in_fan_out", False) else delta)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(device="cpu", dtype=dtype if tensor.is_floating_point() else tensor.dtype).clone()


def _parents(name: str) -> list[str]:
    """Names of the modules around a parameter, innermost first."""
    pieces = name.split(".")
    return [".".join(pieces[:end]) for end in range(len(pieces) - 1, 0, -1)]


def _module_of(name: str) -> str:
    """q_proj of base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"""
    return name.split(".lora_")[0].rsplit(".", 1)[-1]
