"""Whether models can be read where this runs, and are whole; hub ids are downloaded."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1 import Model
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.preflight.report import Found, Report, error, not_checked
from opd_trainer.teachers.facts import config_value, model_folder, read_json

#: What a model's folder needs; everything else of a hub repository (other formats, images) stays there.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
TOKENIZER = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
#: Only with trustRemoteCode: without it nothing runs such files.
CODE = ("*.py",)
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
    patterns = (*WEIGHTS, *TOKENIZER, *(CODE if model.trust_remote_code else ()))
    folder, findings = _folder(config, model.source, model.revision, path, report, patterns)
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


def resolve_tokenizer(
    config: TrainerConfig, source: str, path: str, report: Report, *, trust_remote_code: bool
) -> Path | None:
    """Folder of a tokenizer that is not part of a resolved model."""
    patterns = (*TOKENIZER, *CODE) if trust_remote_code else TOKENIZER
    folder, findings = _folder(config, source, None, path, report, patterns)
    report.add(findings)
    return folder


def reading_errors(*, trust_remote_code: bool) -> tuple[type[Exception], ...]:
    """What transformers raises about a folder that it cannot read; code of the folder's own may raise anything."""
    return (Exception,) if trust_remote_code else (OSError, ValueError, KeyError)


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
    if config.preflight.download:
        return _download(config, source, revision, path, report, patterns)
    folder = model_folder(source, config.hub_directory, revision)
    if folder is None:
        message = f"{source} is not in {config.hub_directory}. Set preflight.download: true, or give an absolute path"
        return None, [error(Reason.MODEL_NOT_FOUND, path, message)]
    return folder, []


def _download(
    config: TrainerConfig, source: str, revision: str | None, path: str, report: Report, patterns: tuple[str, ...]
) -> tuple[Path | None, list[Found]]:
    """A folder that is there may be what an interrupted download left, or one of the tokenizer only. So the hub is asked
    every time: it sends what is missing, which is nothing where everything is there."""
    os.environ.setdefault("HF_HOME", config.hub_directory)
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    def fetch() -> str:
        options: dict[str, Any] = {
            "revision": revision,
            "cache_dir": str(Path(config.hub_directory) / "hub"),
            "allow_patterns": list(patterns),
        }
        try:
            return str(snapshot_download(source, **options))
        except (HTTPError, OSError):
            # The hub's library looks for a whole copy itself when it has no connection, not after every other error.
            with contextlib.suppress(OSError):
                return str(snapshot_download(source, local_files_only=True, **options))
            raise

    report.say(f"            {path}: downloading what {config.hub_directory} lacks of {source}")
    try:
        return Path(fetch()), []
    except RepositoryNotFoundError as problem:
        message = f"the hub has no model {source}, or it needs a token (HF_TOKEN in runtime.env): {first_line(problem)}"
        return None, [error(Reason.MODEL_NOT_FOUND, path, message)]
    except HfHubHTTPError as problem:
        refused = problem.response is not None and 400 <= problem.response.status_code < 500
        return None, [_unreachable(source, path, problem, FailureClass.CONFIG if refused else None)]
    except (HTTPError, OSError) as problem:
        return None, [_unreachable(source, path, problem, None)]
    except ValueError as problem:  # not a repository id
        return None, [error(Reason.MODEL_NOT_FOUND, path, f"{source} is neither a path nor a hub id: {problem}")]


def _unreachable(source: str, path: str, problem: Exception, failure_class: FailureClass | None) -> Found:
    return error(
        Reason.MODEL_NOT_FOUND,
        path,
        f"{source} cannot be downloaded: {first_line(problem)}. Where pods have no way to the hub, put the model on the"
        " claim and give its path",
        failure_class=failure_class or FailureClass.INFRASTRUCTURE,
    )


def first_line(problem: Exception) -> str:
    """What a finding says of an exception."""
    lines = str(problem).strip().splitlines()
    return lines[0][:200] if lines else type(problem).__name__


def _unusable(folder: Path, model: Model) -> str | None:
    """Why a folder cannot be loaded as a causal language model, or None."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not (folder / "config.json").is_file():
        return "the folder has no config.json"
    if lacking := _lacking(folder):
        return lacking
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except reading_errors(trust_remote_code=model.trust_remote_code) as problem:
        return f"config.json is not understood: {first_line(problem)}"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not model.trust_remote_code:
        return f"{config.model_type} is no causal language model that transformers knows"
    return None


def _lacking(folder: Path) -> str | None:
    """What is missing of the weights, or None: a copy or download that was cut off leaves a folder that looks like a model."""
    here = {file.name for file in folder.glob("*.safetensors") if file.is_file()}
    if not here:
        return "the folder has no safetensors"
    if (folder / INDEX).is_file():
        try:
            wanted, source = set(map(str, read_json(folder, INDEX)["weight_map"].values())), f"its {INDEX} names"
        except (ValueError, KeyError, AttributeError):
            return f"{INDEX} is no index of shards; copy or download it again"
    else:
        wanted, source = _numbered(here), "the others are numbered for"
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if not missing:
        return None
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"the folder lacks {missing[0]}{more}, which {source}; copy or download the model again"


def _numbered(names: set[str]) -> set[str]:
    """All shards of the series that the names are of."""
    found = set()
    for match in filter(None, map(SHARD.fullmatch, names)):
        stem, total = match.groups()
        found |= {f"{stem}-{number:05d}-of-{total}.safetensors" for number in range(1, int(total) + 1)}
    return found


def _parameters(folder: Path, settings: dict[str, object]) -> int:
    """From the size of the weights and their type."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    name = str(settings.get("dtype") or settings.get("torch_dtype") or "bfloat16")
    return size // BYTES_PER_PARAMETER.get(name, 2)
