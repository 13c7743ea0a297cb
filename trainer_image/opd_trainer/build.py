"""TrainerConfig -> the controller's parts. The one place that knows every implementation."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1 import WeightSync
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.controller import Parts
from opd_trainer.controller.run import TOKENIZER_FINGERPRINT
from opd_trainer.controller.state import RunState
from opd_trainer.errors import TrainerError
from opd_trainer.interfaces import Learner, RolloutEngine, Scorer
from opd_trainer.learner.checkpoints import CheckpointStore
from opd_trainer.metrics import PrometheusMetrics
from opd_trainer.ray_runtime import start_ray
from opd_trainer.rollout.data import (
    Prompt,
    PromptEncoder,
    PromptStream,
    data_error,
    load_records,
    require_fields,
    steps_of_epochs,
)
from opd_trainer.rollout.filters import build_filter
from opd_trainer.rollout.rewards import MathVerify, build_reward, needs_answer
from opd_trainer.runlog import RunLog
from opd_trainer.sample import Sample
from opd_trainer.storage import RunDirectory
from opd_trainer.summary import RunReporter
from opd_trainer.teachers.routing import route_rows, routing_field

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)
#: Metric of every step: rows of the data without a teacher, where routing.strict is false.
ROWS_LEFT_OUT = "rows_left_out"


@dataclass(slots=True)
class Built:
    """Parts, and what has to be closed after the run."""

    parts: Parts
    closers: list[Callable[[], Awaitable[None]]]

    async def close(self) -> None:
        """Release files and worker processes."""
        for close in self.closers:
            await close()


async def build_parts(
    config: TrainerConfig, directory: RunDirectory, state: RunState, prometheus: PrometheusMetrics
) -> Built:
    """Raises TrainerError: Data, Config or Infrastructure, each with what to do."""
    if config.training.weight_sync is not WeightSync.DISK:
        raise TrainerError(
            FailureClass.CONFIG,
            Reason.CONFIG_ERROR,
            f"training.weightSync {config.training.weight_sync} is not there yet; write disk",
        )
    await asyncio.to_thread(directory.create)
    tokenizer = await asyncio.to_thread(load_tokenizer, config)
    data = await asyncio.to_thread(open_data, config, tokenizer)
    if data.left_out:
        state.metrics[ROWS_LEFT_OUT] = float(data.left_out)
    reward, keep = build_reward(config.task.reward), build_filter(config.task.filter)
    checkpoint = config.training.checkpoint
    store = CheckpointStore(
        directory.root, config.run.attempt, keep_last=checkpoint.keep_last, keep_every_steps=checkpoint.keep_every_steps
    )
    found = await asyncio.to_thread(store.resume, checkpoint.resume)
    # Not beside the imports above: a node of Ray whose agents need more than 15 s to start gives up.
    await asyncio.to_thread(start_ray, config)
    log = RunLog(
        config,
        directory,
        prometheus,
        resume_step=found.step if found is not None else 0,
        split=_splitter(tokenizer),
    )
    prometheus.total_steps.set(data.total_steps)
    engine, learner, scorer = _actors(config, log, data.total_steps)
    parts = Parts(
        engine=engine,
        scorer=scorer,
        learner=learner,
        store=store,
        stream=data.stream,
        log=log,
        total_steps=data.total_steps,
        reward=reward,
        keep=keep,
        decode=_decoder(tokenizer) if _needs_text(config) else None,
        evaluation_prompts=data.held_out,
        resume_from=found.path if found is not None else None,
        resume_state=found.controller_state if found is not None else None,
        fingerprints=_fingerprints(config, tokenizer),
        report=RunReporter(config, directory, state, log, render=_renderer(config)),
    )

    async def close_log() -> None:
        log.close()

    closers: list[Callable[[], Awaitable[None]]] = [close_log]
    if isinstance(reward, MathVerify):
        closers.append(reward.close)
    return Built(parts, closers)


def _actors(config: TrainerConfig, log: RunLog, total_steps: int) -> tuple[RolloutEngine, Learner, Scorer]:
    from opd_trainer.learner.group import LearnerGroup
    from opd_trainer.rollout.engines import create_engine
    from opd_trainer.teachers.pool import TeacherPool

    learner = LearnerGroup(config, total_steps=total_steps)
    return create_engine(config), learner, TeacherPool(config, listener=log.teacher_request)


def _renderer(config: TrainerConfig) -> Callable[[Path], Path] | None:
    if not config.diagnostics.report:
        return None

    def render(run_directory: Path) -> Path:
        from opd_trainer.report import write_report  # matplotlib is slow to import and needed late

        return write_report(run_directory)

    return render


# -- tokenizer and data ------------------------------------------------------------------------------------------------


def load_tokenizer(config: TrainerConfig) -> Any:
    """The student's tokenizer. Raises TrainerError(Config, ModelNotFound)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    source = config.student.tokenizer or config.student.model.source
    try:
        return AutoTokenizer.from_pretrained(
            source,
            revision=config.student.model.revision if config.student.tokenizer is None else None,
            trust_remote_code=config.student.model.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise TrainerError(
            FailureClass.CONFIG,
            Reason.MODEL_NOT_FOUND,
            f"the tokenizer of the student {source} cannot be read: {error}",
        ) from error


def needed_fields(config: TrainerConfig) -> dict[str, str]:
    """Fields that the data must have, by the path in the spec that names them."""
    fields = {"data.promptField": config.data.prompt_field}
    if needs_answer(config.task.reward):
        fields["data.answerField"] = config.data.answer_field
    routing = routing_field(config.routing, config.data)
    return fields if routing is None else {**fields, routing[0]: routing[1]}


@dataclass(frozen=True, slots=True)
class JobData:
    """The prompts of a run."""

    stream: PromptStream
    total_steps: int
    #: For evaluations, the same ones every time.
    held_out: list[Prompt]
    #: Rows of data.source that no teacher scores; they are not in the stream.
    left_out: int


def open_data(config: TrainerConfig, tokenizer: Any) -> JobData:
    """Read prompts and held-out prompts. Raises TrainerError(Data)."""
    data, training = config.data, config.training
    records, left_out = _routed_records(config, data.source, "data.source")
    stream = PromptStream(records, PromptEncoder(tokenizer, data.chat_template), data)
    steps = training.steps
    if steps is None:
        assert training.epochs is not None, "rule 18: exactly one of steps and epochs"
        steps = steps_of_epochs(training.epochs, stream.usable(), training.prompts_per_step)
    return JobData(stream, steps, _held_out_prompts(config, tokenizer), left_out)


def _routed_records(config: TrainerConfig, source: str, field: str) -> tuple[Sequence[dict[str, Any]], int]:
    """Rows that a teacher scores, and the number of the others: a rollout that nobody scores is for nothing."""
    records = load_records(source, config.data.split, field=field)
    require_fields(records, needed_fields(config))
    routed = route_rows(config.routing, config.data, records)
    if routed is None or not routed.left_out:
        return records, 0
    if config.routing.strict or not routed.rows:
        raise data_error(Reason.DATA_ERROR, f"{field} {source}: {routed.complaint}")
    logger.warning("%s %s: %s. From here on rows are counted without them", field, source, routed.complaint)
    return cast("Dataset", records).select(routed.rows), routed.left_out


def _held_out_prompts(config: TrainerConfig, tokenizer: Any) -> list[Prompt]:
    """The first `samples` usable prompts of the evaluation file."""
    evaluation = config.training.evaluation
    if evaluation is None:
        return []
    records, _ = _routed_records(config, evaluation.source, "training.evaluation.source")
    data = config.data.model_copy(update={"source": evaluation.source, "shuffle": False})
    stream = PromptStream(records, PromptEncoder(tokenizer, data.chat_template), data)
    prompts = (stream.encode(ticket) for ticket in range(stream.size))
    return list(islice((prompt for prompt in prompts if prompt is not None), evaluation.samples))


def _needs_text(config: TrainerConfig) -> bool:
    return config.task.reward != "none" or config.task.filter is not None or config.diagnostics.log_responses


def _decoder(tokenizer: Any) -> Callable[[Sample], str]:
    def decode(sample: Sample) -> str:
        return str(tokenizer.decode(sample.response_ids, skip_special_tokens=True))

    return decode


def _splitter(tokenizer: Any) -> Callable[[NDArray[np.int32]], list[str]]:
    def split(ids: NDArray[np.int32]) -> list[str]:
        return [str(tokenizer.decode([token])) for token in ids.tolist()]

    return split


def _fingerprints(config: TrainerConfig, tokenizer: Any) -> dict[str, str]:
    """What must not change silently between a checkpoint and its resume."""
    sections = {"student", "distillation", "task", "data", "rollout", "training"}
    document = config.model_dump(mode="json", by_alias=True, include=sections)
    return {
        "configuration": _digest(document),
        TOKENIZER_FINGERPRINT: _digest({"vocabulary": tokenizer.get_vocab(), "special": tokenizer.all_special_ids}),
    }


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
