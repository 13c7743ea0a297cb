"""Limits of a teacher that a client must know before it sends: from the model's own files, then from the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson

from opd_api.trainer_config import TrainerConfig, TrainerTeacher
from opd_trainer.teachers.client import TeacherClient
from opd_trainer.teachers.faults import Fault

FACT_SECONDS = 10.0


def model_folder(source: str, hub_directory: str, revision: str | None = None) -> Path | None:
    """Folder of a model: the path itself, or its snapshot in the hub directory. None when it is not there."""
    path = Path(source)
    if path.is_absolute():
        return path if path.is_dir() else None
    repository = Path(hub_directory) / "hub" / f"models--{source.replace('/', '--')}"
    name = revision or "main"
    reference = repository / "refs" / name
    commit = reference.read_text().strip() if reference.is_file() else name
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def read_json(folder: Path | None, name: str) -> dict[str, Any]:
    """A JSON object from a model's folder; empty when there is none."""
    if folder is None or not (folder / name).is_file():
        return {}
    document = json.loads((folder / name).read_text(encoding="utf-8"))
    return document if isinstance(document, dict) else {}


def config_value(config: dict[str, Any], name: str) -> Any:
    """A value of config.json, also from the text part of a multimodal model."""
    nested = config.get("text_config")
    return config.get(name, nested.get(name) if isinstance(nested, dict) else None)


def vocabulary_of(config: TrainerConfig, teacher: TrainerTeacher) -> int | None:
    """Rows of the teacher's embedding, where its files can be read; otherwise the student's, which has the same tokens."""
    for model in (teacher.model, config.student.model):
        if model is None:
            continue
        folder = model_folder(model.source, config.hub_directory, model.revision)
        size = config_value(read_json(folder, "config.json"), "vocab_size")
        if isinstance(size, int):
            return size
    return None


async def learn_facts(client: TeacherClient) -> None:
    """Complete vocabulary, context and served id from `/model_info` or `/v1/models`. A silent server changes nothing."""
    for replica in client.replicas:
        info = await _get(client, replica.endpoint, "/model_info")
        models = (await _get(client, replica.endpoint, "/v1/models")).get("data")
        first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        if not info and not first:
            continue
        if isinstance(info.get("vocab_size"), int):
            client.facts.vocabulary = info["vocab_size"]
        context = info.get("max_context_tokens") or first.get("max_model_len")
        if isinstance(context, int):
            client.facts.context = min(context, client.facts.context or context)
        client.facts.model = client.facts.model or first.get("id") or info.get("served_model_name")
        return


async def _get(client: TeacherClient, endpoint: Any, path: str) -> dict[str, Any]:
    try:
        status, data = await client.request("GET", endpoint, path, seconds=FACT_SECONDS)
        document = orjson.loads(data) if status == 200 else {}
    except (Fault, orjson.JSONDecodeError):
        return {}
    return document if isinstance(document, dict) else {}
