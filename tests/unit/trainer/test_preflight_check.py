"""The input check: every wrong input gets a finding that names field and remedy; what cannot be seen is not called wrong."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from opd_testing.configs import trainer_config
from opd_testing.tiny_models import write_model, write_tokenizer

from opd_api.progress import FinalDocument
from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import ExitCode, FailureClass, Outcome, Reason, Severity
from opd_trainer.preflight import models as models_module
from opd_trainer.preflight.check import check_inputs, run_check
from opd_trainer.preflight.report import Found, Report, error, fitting_json, not_checked
from opd_trainer.preflight.storage import bytes_needed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root / "student", seed=1)
    write_model(root / "teacher", seed=2)
    return root


@pytest.fixture
def claim(tmp_path: Path, folders: Path) -> Path:
    """A claim with models and prompts, fresh for each test."""
    for name in ("student", "teacher"):
        shutil.copytree(folders / name, tmp_path / name)
    write_prompts(tmp_path, [{"prompt": f"{n} + {n} = ?", "data_source": "math", "answer": 2 * n} for n in range(20)])
    return tmp_path


def write_prompts(root: Path, rows: list[dict[str, Any]]) -> None:
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(claim: Path, **sections: Any) -> TrainerConfig:
    student = sections.pop("student_source", str(claim / "student"))
    teachers = sections.pop("teachers", None) or [
        {"name": "teacher", "backend": "transformers", "model": {"source": str(claim / "teacher")}}
    ]
    return trainer_config(claim, student=student, teachers=teachers, **sections)


def findings(config: TrainerConfig) -> list[Found]:
    report = Report("input check")
    check_inputs(config, report)
    return report.found


def only(config: TrainerConfig, severity: Severity = Severity.ERROR) -> Found:
    found = [item for item in findings(config) if item.severity is severity]
    assert len(found) == 1, found
    return found[0]


def test_right_inputs_pass_and_show_the_first_prompts(claim: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(claim)
    (claim / "job.json").write_text(config.to_json())
    assert run_check(str(claim / "job.json"), termination_log=str(claim / "log")) == ExitCode.OK
    document = FinalDocument.model_validate_json((claim / "log").read_text())
    assert (document.outcome, document.findings) == (Outcome.SUCCEEDED, [])
    assert "0 + 0 = ?" in capsys.readouterr().out


def test_a_missing_configuration_is_a_configuration_error(tmp_path: Path) -> None:
    assert run_check(str(tmp_path / "none.json"), termination_log=str(tmp_path / "log")) == ExitCode.CONFIG


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "row 1 is not UTF-8"),
        (b'{"prompt": []}\n', "row 0 has nothing in 'prompt'"),
        (b'{"prompt": "a"}\n{"prompt"\n', "JSON parse error"),
        (b"", "no rows"),
        (b"\n\n", "corresponds to no data"),
    ],
)
def test_a_prompts_file_that_cannot_be_read_is_told_with_its_fault(claim: Path, content: bytes, words: str) -> None:
    (claim / "prompts.jsonl").write_bytes(content)
    found = only(config_of(claim))
    assert found.reason is Reason.DATA_ERROR
    assert words in found.message


def test_a_missing_data_file_ends_with_the_data_class(claim: Path) -> None:
    (claim / "prompts.jsonl").unlink()
    config = config_of(claim)
    found = only(config)
    assert (found.reason, found.path) == (Reason.DATA_NOT_FOUND, "spec.data.source")
    (claim / "job.json").write_text(config.to_json())
    assert run_check(str(claim / "job.json"), termination_log=str(claim / "log")) == ExitCode.DATA
    document = FinalDocument.model_validate_json((claim / "log").read_text())
    assert document.failure_class is FailureClass.DATA
    assert document.reason == Reason.DATA_NOT_FOUND


def test_a_wrong_field_is_named_with_the_fields_that_exist(claim: Path) -> None:
    found = only(config_of(claim, data={"promptField": "question"}))
    assert (found.reason, found.path) == (Reason.FIELD_NOT_FOUND, "spec.data.promptField")
    assert "answer, data_source, prompt" in found.message


def test_an_answer_field_is_needed_only_where_a_reward_reads_it(claim: Path) -> None:
    write_prompts(claim, [{"prompt": "hello"}] * 4)
    assert findings(config_of(claim)) == []
    reward = {"reward": "exact_match", "taskAdvWeight": 1.0, "advantageEstimator": "grpo"}
    assert only(config_of(claim, task=reward)).path == "spec.data.answerField"


def test_a_data_source_without_a_teacher_is_found_before_training(claim: Path) -> None:
    teachers = [
        {"name": name, "backend": "transformers", "model": {"source": str(claim / "teacher")}} for name in ("a", "b")
    ]
    found = only(config_of(claim, teachers=teachers, routing={"map": {"code": "a", "prose": "b"}}))
    assert found.path == "spec.routing.map"
    assert "'math'" in found.message


def test_prompts_that_are_all_too_long_are_an_error_and_some_a_warning(claim: Path) -> None:
    write_prompts(claim, [{"prompt": "x" * 500}, {"prompt": "short"}])
    assert "1 of the first 2" in only(config_of(claim), Severity.WARNING).message
    write_prompts(claim, [{"prompt": "x" * 500}])
    assert only(config_of(claim)).path == "spec.data.maxPromptTokens"


def test_a_missing_model_on_the_claim_is_an_error(claim: Path) -> None:
    shutil.rmtree(claim / "teacher")
    found = [
        item for item in findings(config_of(claim, progress_config_map="tiny-progress")) if item.severity == "Error"
    ]
    assert [(item.reason, item.path) for item in found] == [(Reason.MODEL_NOT_FOUND, "spec.teachers[0].model.source")]


def test_a_node_local_model_that_the_check_cannot_see_is_not_called_wrong(claim: Path) -> None:
    teachers = [{"name": "teacher", "backend": "transformers", "model": {"source": "/node/cache/teacher"}}]
    config = config_of(claim, teachers=teachers, progress_config_map="tiny-progress")
    found = findings(config)
    assert {item.severity for item in found} == {Severity.NOT_CHECKED}
    assert found[0].path == "spec.teachers[0].model.source"
    local = config_of(claim, teachers=teachers)
    assert next(item.severity for item in findings(local)) is Severity.ERROR, "on a laptop everything can be seen"


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "vit"}'), "no causal language model"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "from-the-future"}'), "not understood"),
    ],
)
def test_a_folder_that_is_no_language_model_is_refused(claim: Path, spoil: Any, complaint: str) -> None:
    spoil(claim / "student")
    found = [item for item in findings(config_of(claim)) if item.path == "spec.student.model.source"]
    assert complaint in found[0].message


def test_other_token_ids_are_an_error_with_examples(claim: Path) -> None:
    write_tokenizer(claim / "teacher", extra=["<extra>"])
    found = only(config_of(claim))
    assert found.reason is Reason.TOKENIZER_MISMATCH
    assert found.teacher == "teacher"
    assert "'<extra>' is None for the student and 259 for teacher" in found.message


def test_other_end_tokens_are_an_error(claim: Path) -> None:
    path = claim / "teacher" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, 2]}))
    assert "[1] for the student and [1, 2] for teacher" in only(config_of(claim)).message


def test_other_special_tokens_are_an_error_and_other_padding_a_warning(claim: Path) -> None:
    path = claim / "teacher" / "tokenizer_config.json"
    before = json.loads(path.read_text())
    path.write_text(json.dumps({**before, "bos_token": "<eos>"}))
    assert "bos_token is 2 for the student and 1 for teacher" in only(config_of(claim)).message
    path.write_text(json.dumps({**before, "pad_token": "<eos>"}))
    assert "harmless" in only(config_of(claim), Severity.WARNING).message
    assert not [item for item in findings(config_of(claim)) if item.severity is Severity.ERROR]


def test_a_padded_vocabulary_is_a_warning(claim: Path) -> None:
    path = claim / "teacher" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 320}))
    assert "259 and 320 rows" in only(config_of(claim), Severity.WARNING).message


def test_the_tokenizer_check_can_be_switched_off(claim: Path) -> None:
    write_tokenizer(claim / "teacher", extra=["<extra>"])
    assert findings(config_of(claim, preflight={"checkTokenizer": False})) == []


def test_an_external_teacher_without_a_tokenizer_is_not_checked(claim: Path) -> None:
    teachers = [{"name": "teacher", "backend": "vllm", "endpoints": ["http://127.0.0.1:1"]}]
    found = only(config_of(claim, teachers=teachers), Severity.NOT_CHECKED)
    assert "tokenizer" in found.message
    teachers[0]["tokenizer"] = str(claim / "teacher")
    assert findings(config_of(claim, teachers=teachers)) == []


def test_sequences_that_no_model_takes_are_found(claim: Path) -> None:
    found = findings(config_of(claim, rollout={"maxResponseTokens": 500}))
    assert [(item.reason, item.path) for item in found] == [
        (Reason.CONTEXT_TOO_SHORT, "spec.student.model.source"),
        (Reason.CONTEXT_TOO_SHORT, "spec.teachers[0]"),
    ]


def test_a_top_k_larger_than_the_vocabulary_is_found(claim: Path) -> None:
    wanted = {"signal": "loss", "tokenSelection": "teacher_topk", "topK": 100_000}
    found = findings(config_of(claim, distillation=wanted))
    assert {(item.reason, item.path) for item in found} == {(Reason.TEACHER_TOPK_TOO_SMALL, "spec.distillation.topK")}
    assert "Write topK: 64" in found[0].message


def test_a_reward_that_cannot_be_imported_is_found(claim: Path) -> None:
    found = only(config_of(claim, task={"reward": "no_such_module:score"}))
    assert found.path == "spec.task.reward"


def test_a_claim_that_cannot_be_written_is_found(claim: Path) -> None:
    (claim / "run").write_text("a file where the run directory should be")
    found = only(config_of(claim))
    assert found.reason is Reason.STORAGE_NOT_WRITABLE
    assert "securityContext" in found.message


def test_a_claim_without_room_for_the_checkpoints_is_found(claim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    found = only(config_of(claim))
    assert found.reason is Reason.STORAGE_FULL
    assert "keepLast" in found.message


def test_more_checkpoints_need_more_room(claim: Path) -> None:
    few = bytes_needed(config_of(claim), 1000)
    many = bytes_needed(config_of(claim, training={"checkpoint": {"keepLast": 5}}), 1000)
    assert many - few == 3 * 12 * 1000


def test_a_hub_id_without_a_download_needs_a_copy_on_the_claim(claim: Path) -> None:
    config = config_of(claim, student_source="org/student", preflight={"download": False})
    found = findings(config)
    assert found[0].path == "spec.student.model.source"
    assert "preflight.download" in found[0].message
    snapshot = claim / "hf" / "hub" / "models--org--student" / "snapshots" / "abc"
    shutil.copytree(claim / "student", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    assert findings(config_of(claim, student_source="org/student", preflight={"download": False})) == []


def test_a_hub_that_cannot_be_reached_is_an_infrastructure_failure(
    claim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    found = findings(config_of(claim, student_source="org/student"))
    assert found[0].error_class is FailureClass.INFRASTRUCTURE
    assert "give its path" in found[0].message


def test_a_download_goes_to_the_claim_and_every_check_asks_for_what_is_missing(
    claim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    calls: list[dict[str, Any]] = []

    def download(source: str, **options: Any) -> str:
        calls.append({"source": source, **options})
        folder = Path(options["cache_dir"]) / "models--org--student" / "snapshots" / "main"
        shutil.copytree(claim / "student", folder, dirs_exist_ok=True)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = config_of(claim, student_source="org/student")
    assert findings(config) == []
    assert findings(config) == []
    assert len(calls) == 2
    assert calls[0] == calls[1]
    assert calls[0]["cache_dir"] == str(claim / "hf" / "hub")
    assert "*.safetensors" in calls[0]["allow_patterns"]
    assert not any("bin" in pattern for pattern in calls[0]["allow_patterns"])


def test_errors_come_first_and_the_document_fits_into_a_termination_message() -> None:
    report = Report("input check")
    report.add([not_checked(Reason.MODEL_NOT_FOUND, "spec.a", "n" * 900) for _ in range(12)])
    report.add([error(Reason.FIELD_NOT_FOUND, "spec.data.promptField", "é" * 900) for _ in range(8)])
    document = report.final(3)
    assert (document.attempt, document.failure_class, document.reason) == (3, FailureClass.DATA, "FieldNotFound")
    assert "(and 7 more)" in document.message
    text = fitting_json(document)
    assert len(text.encode()) <= 4096
    assert FinalDocument.model_validate_json(text).findings[0].code == "FieldNotFound"


def test_what_a_retry_cannot_help_decides_for_the_whole_check() -> None:
    report = Report("input check")
    unreachable = FailureClass.INFRASTRUCTURE
    report.add(
        [
            error(Reason.MODEL_NOT_FOUND, "spec.student.model.source", "no hub", failure_class=unreachable),
            error(Reason.DATA_NOT_FOUND, "spec.data.source", "no file"),
        ]
    )
    document = report.final(1)
    assert (document.failure_class, document.reason) == (FailureClass.DATA, "DataNotFound")
    assert document.message == "spec.data.source: no file (and 1 more)"


def test_a_missing_held_out_file_is_named_by_its_own_field(claim: Path) -> None:
    missing = str(claim / "held-out.jsonl")
    found = only(config_of(claim, training={"evaluation": {"source": missing}}))
    assert (found.path, found.reason) == ("spec.training.evaluation.source", Reason.DATA_NOT_FOUND)
    assert found.message.startswith(f"training.evaluation.source {missing} does not exist")


def test_the_message_of_a_failure_is_bounded() -> None:
    report = Report("input check")
    report.add([error(Reason.DATA_ERROR, "spec.data", "x" * 5000)])
    assert len(report.final(1).message) <= 1024


def test_models_module_knows_where_it_runs(claim: Path) -> None:
    assert models_module.visible_here(config_of(claim), "/anywhere")
    cluster = config_of(claim, progress_config_map="p")
    assert models_module.visible_here(cluster, str(claim / "x"))
    assert not models_module.visible_here(cluster, "/anywhere")


def test_a_prompt_that_is_missing_after_many_rows_is_found_before_training(claim: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{n} + {n} = ?", "data_source": "math"} for n in range(1500)]
    rows[1400]["prompt"] = None
    rows[1450]["prompt"] = ""
    write_prompts(claim, rows)
    found = only(config_of(claim))
    assert (found.reason, found.path) == (Reason.DATA_ERROR, "spec.data.promptField")
    assert "row 1400 (and 1 more) has nothing in 'prompt'" in found.message


def test_a_data_source_without_a_teacher_is_found_in_any_row(claim: Path) -> None:
    write_prompts(claim, [{"prompt": "x", "data_source": "a" if n < 1400 else "prose"} for n in range(1500)])
    teachers = [
        {"name": name, "backend": "transformers", "model": {"source": str(claim / "teacher")}} for name in ("a", "b")
    ]
    assert "'prose'" in only(config_of(claim, teachers=teachers, routing={"map": {"a": "a"}})).message
    routing = {"map": {"a": "a"}, "key": "topic"}
    assert only(config_of(claim, teachers=teachers, routing=routing)).path == "spec.routing.key"


def test_a_row_that_would_end_a_training_is_found_behind_the_first_ones(claim: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{n} + {n} = ?"} for n in range(1500)]
    rows[1400]["prompt"] = "x" * 500
    write_prompts(claim, rows)
    found = only(config_of(claim, data={"overlong": "error"}))
    assert "row 1400 has" in found.message
    chats: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": f"{n}"}]} for n in range(1500)]
    chats[1300]["prompt"] = [{"role": "user", "content": None}]
    write_prompts(claim, chats)
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    found = only(config_of(claim, data={"chatTemplate": template}))
    assert found.message.startswith("row 1300: the chat template refuses a prompt")


def with_critic(claim: Path, source: Path) -> TrainerConfig:
    task = {"reward": "exact_match", "advantageEstimator": "gae", "critic": {"model": {"source": str(source)}}}
    return config_of(claim, task=task, data={"answerField": "answer"})


def test_a_critic_that_is_not_there_is_an_error_before_a_gpu_is_taken(claim: Path) -> None:
    found = only(with_critic(claim, claim / "critic"))
    assert (found.path, found.reason) == ("spec.task.critic.model.source", Reason.MODEL_NOT_FOUND)
    shutil.copytree(claim / "student", claim / "critic")
    assert not [item for item in findings(with_critic(claim, claim / "critic")) if item.severity is Severity.ERROR]


def test_a_critic_that_does_not_know_every_token_of_the_student_is_an_error(claim: Path) -> None:
    write_model(claim / "critic", vocabulary=258)
    found = only(with_critic(claim, claim / "critic"))
    assert (found.path, found.reason) == ("spec.task.critic.model.source", Reason.TOKENIZER_MISMATCH)
