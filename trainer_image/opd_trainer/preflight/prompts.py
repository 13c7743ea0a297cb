"""The data as the check sees it: readable, with the fields that the job names, routed, and not too long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1 import Data, Overlong
from opd_api.vocabulary import Reason
from opd_trainer.build import needed_fields
from opd_trainer.errors import TrainerError
from opd_trainer.preflight.models import visible_here
from opd_trainer.preflight.report import Found, Report, error, not_checked, of_exception, warning
from opd_trainer.rollout.columns import column, empty, garbled, longest, odd_messages
from opd_trainer.rollout.data import Prompt, PromptEncoder, PromptStream, load_records, require_fields
from opd_trainer.rollout.filters import build_filter
from opd_trainer.rollout.rewards import build_reward
from opd_trainer.teachers.routing import route_rows, routing_field

PROMPT_FIELD = "spec.data.promptField"
ANSWER_FIELD = "spec.data.answerField"
SHOWN = 3
SUSPECTS = 50
#: Rows that are encoded to see how long they are.
SCANNED = 1000
EXCERPT = 160


def check_task(config: TrainerConfig, report: Report) -> None:
    """Reward and filter can be imported."""
    try:
        build_reward(config.task.reward)
    except TrainerError as problem:
        report.add([of_exception(problem, "spec.task.reward")])
    try:
        build_filter(config.task.filter)
    except TrainerError as problem:
        report.add([of_exception(problem, "spec.task.filter")])


def check_data(config: TrainerConfig, tokenizer: Any, report: Report) -> list[Prompt]:
    """Findings for the prompts; returns the first ones. `tokenizer` None skips what needs one."""
    data = config.data
    records = _records(config, data.source, "spec.data.source", report)
    if records is None:
        return []
    report.say(f"        ok  spec.data.source: {data.source}, {len(records)} rows")
    findings = _missing_fields(config, records, data.source)
    rows, unrouted = _routed(config, records, data.source, findings)
    findings += unrouted
    report.add(findings)
    unusable = any(item.reason is Reason.FIELD_NOT_FOUND or item.path == PROMPT_FIELD for item in findings)
    if unusable or tokenizer is None:
        return []
    return _first_prompts(config, records, rows, tokenizer, report)


def check_evaluation(config: TrainerConfig, report: Report) -> None:
    """The held-out file has the prompts' fields, and teachers."""
    evaluation = config.training.evaluation
    if evaluation is None:
        return
    path = "spec.training.evaluation.source"
    records = _records(config, evaluation.source, path, report)
    if records is not None:
        findings = _missing_fields(config, records, evaluation.source)
        report.add(findings + _routed(config, records, evaluation.source, findings)[1])
        report.say(f"        ok  {path}: {evaluation.source}, {len(records)} rows")


def _records(config: TrainerConfig, source: str, path: str, report: Report) -> Sequence[dict[str, Any]] | None:
    if Path(source).is_absolute() and not Path(source).exists() and not visible_here(config, source):
        message = f"{source} is not visible to the check; the Ray head must mount it"
        report.add([not_checked(Reason.DATA_NOT_FOUND, path, message)])
        return None
    try:
        return load_records(source, config.data.split, field=path.removeprefix("spec."))
    except TrainerError as problem:
        report.add([of_exception(problem, path)])
        return None


def _missing_fields(config: TrainerConfig, records: Sequence[dict[str, Any]], source: str) -> list[Found]:
    found = []
    for field, name in needed_fields(config).items():
        path = f"spec.{field}"
        try:
            require_fields(records, {path: name})
        except TrainerError as problem:
            found.append(of_exception(problem, path))
            continue
        found += _gaps(records, path, name, source)
    return found


def _gaps(records: Sequence[dict[str, Any]], path: str, name: str, source: str) -> list[Found]:
    """Rows, all of them looked at, in which a field that is needed is empty or no text."""
    values = column(records, name)
    if values is None:
        return []
    row = garbled(values)
    if row is not None:
        return [error(Reason.DATA_ERROR, path, f"row {row} is not UTF-8 in {name!r} of {source}; correct it")]
    gaps = empty(values)
    if gaps is None:
        return []
    others = f" (and {gaps.count - 1} more)" if gaps.count > 1 else ""
    message = f"row {gaps.first}{others} has nothing in {name!r} of {source}; remove or fill it"
    if path == PROMPT_FIELD:
        return [error(Reason.DATA_ERROR, path, message)]
    return [warning(Reason.DATA_ERROR, path, message)] if path == ANSWER_FIELD else []


def _routed(
    config: TrainerConfig, records: Sequence[dict[str, Any]], source: str, findings: list[Found]
) -> tuple[Sequence[int], list[Found]]:
    """Rows that become samples, and a finding when there are others. `findings` are those of the fields."""
    every = range(len(records))
    field = routing_field(config.routing, config.data)
    if field is None or any(item.path == f"spec.{field[0]}" for item in findings):
        return every, []
    try:
        routed = route_rows(config.routing, config.data, records)
    except TrainerError as problem:
        return every, [of_exception(problem, "spec.routing.map")]
    if routed is None or not routed.left_out:
        return every, []
    message = f"{source}: {routed.complaint}"
    if config.routing.strict or not routed.rows:
        return every, [error(Reason.DATA_ERROR, "spec.routing.map", message)]
    return routed.rows, [warning(Reason.DATA_ERROR, "spec.routing.map", message)]


def _suspects(records: Sequence[dict[str, Any]], data: Data) -> list[int]:
    """Rows behind the first ones that would end a training: messages that a template may refuse, and the longest texts where
    one that is too long is an error."""
    values = column(records, data.prompt_field)
    if values is None or len(records) <= SCANNED:
        return []
    found = odd_messages(values, SUSPECTS)
    if data.overlong is Overlong.ERROR:
        found += longest(values, SUSPECTS)
    return found


def _first_prompts(
    config: TrainerConfig, records: Sequence[dict[str, Any]], rows: Sequence[int], tokenizer: Any, report: Report
) -> list[Prompt]:
    data = config.data.model_copy(update={"shuffle": False})
    path = PROMPT_FIELD
    try:
        stream = PromptStream(records, PromptEncoder(tokenizer, data.chat_template), data)
        encoded = [stream.encode(row) for row in rows[:SCANNED]]
        for row in set(_suspects(records, data)).intersection(rows):
            stream.encode(row)
    except TrainerError as problem:
        report.add([of_exception(problem, path)])
        return []
    prompts = [prompt for prompt in encoded if prompt is not None and len(prompt.ids)]
    long = len(encoded) - len(prompts) + stream.truncated
    if not prompts:
        message = f"none of the first {len(encoded)} prompts fits into data.maxPromptTokens = {data.max_prompt_tokens}"
        report.add([error(Reason.DATA_ERROR, "spec.data.maxPromptTokens", message)])
    elif long:
        message = f"{long} of the first {len(encoded)} prompts are longer than {data.max_prompt_tokens} tokens"
        report.add([warning(Reason.DATA_ERROR, "spec.data.maxPromptTokens", f"{message} ({data.overlong})")])
    for prompt in prompts[:SHOWN]:
        text = " ".join(prompt.text.split())
        excerpt = text if len(text) <= EXCERPT else f"{text[:EXCERPT]}…"
        report.say(f"            {len(prompt.ids)} tokens, source {prompt.data_source or '-'}: {excerpt}")
    return prompts
