"""`opd-trainer check`: models, tokenizers, data and storage, seen by a pod before any accelerator is taken."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from opd_api.trainer_config import TrainerConfig, TrainerTeacher
from opd_api.vocabulary import Reason
from opd_trainer.errors import TrainerError
from opd_trainer.preflight.models import Resolved, first_line, reading_errors, resolve_model, resolve_tokenizer
from opd_trainer.preflight.prompts import check_data, check_evaluation, check_task
from opd_trainer.preflight.report import Found, Report, error, finish, not_checked, of_exception, read_config, warning
from opd_trainer.preflight.storage import check_space, check_writable
from opd_trainer.preflight.tokenizers import TokenizerFacts, compare, read_tokenizer
from opd_trainer.teachers.facts import read_json

STUDENT = "spec.student.model.source"


def run_check(config_path: str, *, termination_log: str | None = None) -> int:
    """Run every check, write the final document, return the exit code."""
    report = Report("input check")
    try:
        config = read_config(config_path)
    except TrainerError as problem:
        report.add([of_exception(problem, config_path)])
        return finish(report, 1, termination_log)
    check_inputs(config, report)
    return finish(report, config.run.attempt, termination_log)


def check_inputs(config: TrainerConfig, report: Report) -> None:
    """All checks; one that fails keeps no other from running."""
    os.environ.setdefault("HF_HOME", config.hub_directory)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    started = time.monotonic()
    writable = check_writable(config, report)
    student = resolve_model(config, config.student.model, STUDENT, report)
    if student is not None:
        if writable:
            check_space(config, student.parameters, report)
        _check_context(config, student.context, "the student", STUDENT, report)
        _check_top_k(config, student.vocabulary, "the student", report)
    facts = _student_tokenizer(config, student, report)
    for index, teacher in enumerate(config.teachers):
        _check_teacher(config, index, teacher, facts, report)
    _check_critic(config, student, report)
    check_task(config, report)
    check_data(config, _tokenizer(config, facts), report)
    check_evaluation(config, report)
    report.say(f"            took {time.monotonic() - started:.1f} s")


def _check_teacher(
    config: TrainerConfig, index: int, teacher: TrainerTeacher, student: TokenizerFacts | None, report: Report
) -> None:
    path = f"spec.teachers[{index}]"
    model = resolve_model(config, teacher.model, f"{path}.model.source", report) if teacher.model else None
    context = teacher.max_context_tokens or (model.context if model else None)
    _check_context(config, context, f"teacher {teacher.name}", path, report)
    if model is not None:
        _check_top_k(config, model.vocabulary, f"teacher {teacher.name}", report)
        report.add(response_cap(config, teacher.name, model.folder))
    if not config.preflight.check_tokenizer:
        return
    folder = model.folder if model else None
    trust = teacher.model.trust_remote_code if teacher.model else False
    if teacher.tokenizer:
        folder = resolve_tokenizer(config, teacher.tokenizer, f"{path}.tokenizer", report, trust_remote_code=trust)
    if folder is None or student is None:
        message = f"the tokenizer of {teacher.name} could not be compared with the student's"
        hint = "" if teacher.model else "; set tokenizer to the external teacher's hub id or path"
        report.add([not_checked(Reason.TOKENIZER_MISMATCH, path, message + hint)])
        return
    facts = _read(folder, model, trust, f"{path}.tokenizer", report)
    if facts is not None:
        findings = compare(student, facts, teacher.name, path)
        report.add(findings)
        if not findings:
            report.say(f"        ok  {path}: {len(facts.vocabulary)} tokens, the same as the student's")


def _check_critic(config: TrainerConfig, student: Resolved | None, report: Report) -> None:
    if config.task.critic is None:
        return
    path = "spec.task.critic.model.source"
    critic = resolve_model(config, config.task.critic.model, path, report)
    known, needed = critic and critic.vocabulary, student and student.vocabulary
    if known is not None and needed is not None and known < needed:
        message = f"the critic knows {known} tokens, the student {needed}; it must take every token of the student"
        report.add([error(Reason.TOKENIZER_MISMATCH, path, message)])


def response_cap(config: TrainerConfig, name: str, folder: Path) -> list[Found]:
    """A warning when responses are cut before the length that the teacher's generation config asks for, where it does."""
    usual = read_json(folder, "generation_config.json").get("max_new_tokens")
    cap = config.rollout.max_response_tokens
    if not isinstance(usual, int) or usual <= cap:
        return []
    message = (
        f"{cap} tokens are fewer than the {usual} that {name} usually writes, so the student mostly learns beginnings."
        f" Write maxResponseTokens: {usual}"
    )
    return [warning(Reason.RESPONSE_CAP_SHORT, "spec.rollout.maxResponseTokens", message)]


def _check_context(config: TrainerConfig, context: int | None, who: str, path: str, report: Report) -> None:
    needed = config.data.max_prompt_tokens + config.rollout.max_response_tokens + 1
    if context is not None and needed > context:
        message = (
            f"a sequence may have {needed} tokens (data.maxPromptTokens + rollout.maxResponseTokens + 1),"
            f" {who} takes {context}"
        )
        report.add([error(Reason.CONTEXT_TOO_SHORT, path, message)])


def _check_top_k(config: TrainerConfig, vocabulary: int | None, who: str, report: Report) -> None:
    wanted = config.distillation.top_k
    if wanted is not None and vocabulary is not None and wanted > vocabulary:
        message = (
            f"topK {wanted} is more than the {vocabulary} tokens that {who} knows. Write topK: {min(64, vocabulary)}"
        )
        report.add([error(Reason.TEACHER_TOPK_TOO_SMALL, "spec.distillation.topK", message)])


def _student_tokenizer(config: TrainerConfig, student: Resolved | None, report: Report) -> TokenizerFacts | None:
    folder, trust = student.folder if student else None, config.student.model.trust_remote_code
    if config.student.tokenizer:
        folder = resolve_tokenizer(
            config, config.student.tokenizer, "spec.student.tokenizer", report, trust_remote_code=trust
        )
    if folder is None:
        return None
    return _read(folder, student, trust, "spec.student.tokenizer", report)


def _read(folder: Path, model: Resolved | None, trust: bool, path: str, report: Report) -> TokenizerFacts | None:
    try:
        return read_tokenizer(folder, model=model.folder if model else None, trust_remote_code=trust)
    except reading_errors(trust_remote_code=trust) as problem:
        message = f"{folder} holds no tokenizer that can be read: {first_line(problem)}"
        report.add([error(Reason.MODEL_NOT_FOUND, path, message)])
        return None


def _tokenizer(config: TrainerConfig, facts: TokenizerFacts | None) -> Any:
    if facts is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(facts.source, trust_remote_code=config.student.model.trust_remote_code)
