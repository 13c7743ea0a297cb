"""Whether models can be read where this runs; hub ids are downloaded once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1 import Model
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.preflight.report import Found, Report, error, not_checked
from opd_trainer.teachers.facts import config_value, model_folder, read_json

#: What a model's folder needs; everything else of a hub repository (other formats, images) stays there.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
TOKENIZER = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
BYTES_PER_PARAMETER = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model that can be read here."""

    folder: Path
    parameters: int
    vocabulary: int | None
    context: int | None


def local_run(config: TrainerConfig) -> bool:
    """True for `opd run`: what is not on this machine is nowhere."""
    return config.run.progress_config_map is None


def visible_here(config: TrainerConfig, path: str) -> bool:
    """Whether a missing path is missing for every pod: below the claim's mount, or in a local run."""
    return local_run(config) or Path(path).is_relative_to(config.run.mount_path)


def resolve_model(config: TrainerConfig, model: Model, path: str, report: Report) -> Resolved | None:
    """Find (or download) a model and look at its files; None with a finding when that is not possible."""
    folder, findings = _folder(config, model.source, model.revision, path, report, (*WEIGHTS, *TOKENIZER))
    report.add(findings)
    if folder is None:
        return None
    problem = _unusable(folder, model)
    if problem:
        report.add([error(Reason.MODEL_NOT_FOUND, path, f"{model.source}: {problem}")])
        return None
    settings = read_json(folder, "config.json")
    resolved = Resolved(
        folder,
        _parameters(folder, settings),
        config_value(settings, "vocab_size"),
        config_value(settings, "max_position_embeddings"),
    )
    report.say(
        f"        ok  {path}: {model.source}, {resolved.parameters / 1e6:,.0f} M parameters,"
        f" context {resolved.context or 'unknown'}"
    )
    return resolved


def resolve_tokenizer(config: TrainerConfig, source: str, path: str, report: Report) -> Path | None:
    """Folder of a tokenizer that is not part of a resolved model."""
    folder, findings = _folder(config, source, None, path, report, TOKENIZER)
    report.add(findings)
    return folder


def _folder(
    config: TrainerConfig, source: str, revision: str | None, path: str, report: Report, patterns: tuple[str, ...]
) -> tuple[Path | None, list[Found]]:
    if Path(source).is_absolute():
        folder = model_folder(source, config.hub_directory)
        if folder is not None:
            return folder, []
        if visible_here(config, source):
            return None, [error(Reason.MODEL_NOT_FOUND, path, f"the folder {source} does not exist")]
        return None, [
            not_checked(Reason.MODEL_NOT_FOUND, path, f"{source} is not visible to the check; the pods must mount it")
        ]
    folder = model_folder(source, config.hub_directory, revision)
    if folder is not None and any(folder.iterdir()):
        return folder, []
    if not config.preflight.download:
        message = f"{source} is not in {config.hub_directory}. Set preflight.download: true, or give an absolute path"
        return None, [error(Reason.MODEL_NOT_FOUND, path, message)]
    return _download(config, source, revision, path, report, patterns)


def _download(
    config: TrainerConfig, source: str, revision: str | None, path: str, report: Report, patterns: tuple[str, ...]
) -> tuple[Path | None, list[Found]]:
    os.environ.setdefault("HF_HOME", config.hub_directory)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    report.say(f"            {path}: downloading {source} into {config.hub_directory}")
    try:
        folder = snapshot_download(
            source,
            revision=revision,
            cache_dir=str(Path(config.hub_directory) / "hub"),
            allow_patterns=list(patterns),
        )
    except RepositoryNotFoundError as problem:
        message = f"the hub has no model {source}, or it needs a token (HF_TOKEN in runtime.env): {_first(problem)}"
        return None, [error(Reason.MODEL_NOT_FOUND, path, message)]
    except HfHubHTTPError as problem:
        refused = problem.response is not None and 400 <= problem.response.status_code < 500
        return None, [_unreachable(source, path, problem, FailureClass.CONFIG if refused else None)]
    except (LocalEntryNotFoundError, OSError) as problem:
        return None, [_unreachable(source, path, problem, None)]
    except ValueError as problem:  # not a repository id
        return None, [error(Reason.MODEL_NOT_FOUND, path, f"{source} is neither a path nor a hub id: {problem}")]
    return Path(folder), []


def _unreachable(source: str, path: str, problem: Exception, failure_class: FailureClass | None) -> Found:
    return error(
        Reason.MODEL_NOT_FOUND,
        path,
        f"{source} cannot be downloaded: {_first(problem)}. Where pods have no way to the hub, put the model on the"
        " claim and give its path",
        failure_class=failure_class or FailureClass.INFRASTRUCTURE,
    )


def _first(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0][:200] if lines else type(problem).__name__


def _unusable(folder: Path, model: Model) -> str | None:
    """Why a folder cannot be loaded as a causal language model, or None."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not (folder / "config.json").is_file():
        return "the folder has no config.json"
    if not any(folder.glob("*.safetensors")):
        return "the folder has no safetensors"
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as problem:
        return f"config.json is not understood: {_first(problem)}"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not model.trust_remote_code:
        return f"{config.model_type} is no causal language model that transformers knows"
    return None


def _parameters(folder: Path, settings: dict[str, object]) -> int:
    """From the size of the weights and their type."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    name = str(settings.get("dtype") or settings.get("torch_dtype") or "bfloat16")
    return size // BYTES_PER_PARAMETER.get(name, 2)
