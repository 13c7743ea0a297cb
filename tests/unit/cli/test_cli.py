"""The command line as a person meets it: output, hints and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from opd_testing.jobs import job_document
from typer.testing import CliRunner

from opd_cli.main import app

RUNNER = CliRunner()


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def make(*documents: Any, name: str = "job.yaml") -> str:
        path = tmp_path / name
        path.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
        return str(path)

    return make


def opd(*arguments: str, text: str | None = None) -> tuple[int, str, str]:
    result = RUNNER.invoke(app, list(arguments), input=text)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


class TestValidate:
    def test_a_good_job_is_accepted_with_its_warnings(self, write: Any) -> None:
        code, out, _ = opd("validate", write(job_document()))
        assert code == 0
        assert "math: accepted, 1 warning" in out
        assert "spec.rollout.maxStaleness HalfIdle" in out

    def test_a_broken_rule_names_path_code_and_remedy_and_fails(self, write: Any) -> None:
        code, out, _ = opd("validate", write(job_document({"spec.distillation.signal": "loss"})))
        assert code == 1
        assert "math: refused, 1 error" in out
        assert "spec.distillation.divergence SampledK1AsLoss" in out
        assert "Write signal: advantage" in out

    def test_a_typo_gets_a_suggestion(self, write: Any) -> None:
        code, out, _ = opd("validate", write(job_document({"spec.distillation.topk": 8})))
        assert (code, "Did you mean 'topK'?" in out) == (1, True)

    def test_all_files_and_documents_are_checked_and_others_skipped(self, write: Any) -> None:
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}}
        first = write(secret, job_document({"metadata.name": "one"}), job_document({"metadata.name": "two"}))
        second = write(job_document({"metadata.name": "3d"}), name="second.yaml")
        code, out, _ = opd("validate", first, second)
        assert code == 1
        assert [name in out for name in ("one: accepted", "two: accepted", "3d: refused", "keys")] == [
            True,
            True,
            True,
            False,
        ]

    def test_standard_input_is_read(self) -> None:
        code, out, _ = opd("validate", "-", text=yaml.safe_dump(job_document()))
        assert (code, "- math: accepted" in out) == (0, True)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (None, "cannot be read"),
            ("a: [", "is no YAML"),
            ("", "holds no OPDJob"),
            ("kind: Secret\napiVersion: v1", "holds no OPDJob"),
        ],
    )
    def test_a_file_without_a_job_is_an_error(self, tmp_path: Path, text: str | None, words: str) -> None:
        path = tmp_path / "job.yaml"
        if text is not None:
            path.write_text(text)
        code, _, err = opd("validate", str(path))
        assert (code, words in err) == (1, True)

    def test_json_lists_every_finding(self, write: Any) -> None:
        code, out, _ = opd("validate", "--json", write(job_document({"spec.rollout.sampling.topP": 0.5})))
        entries = json.loads(out)
        assert code == 1
        assert [entry["code"] for entry in entries] == ["TruncatedSampling", "HalfIdle"]
        assert set(entries[0]) == {"file", "job", "code", "severity", "path", "message"}

    def test_a_local_run_needs_no_claim(self, write: Any) -> None:
        file = write(job_document({"spec.storage": {}}))
        assert (opd("validate", file)[0], opd("validate", "--local", file)[0]) == (1, 0)


class TestExplain:
    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("distillation.tail", "tail, norm, trunc, sampled  default tail"),
            ("spec.distillation", "coefficient  number > 0  default 1"),
            ("teachers.endpoints", "list of text"),
            ("status.phase", "For people"),
            ("training", "steps  integer ≥ 1"),
            ("data", "source  text required"),
            ("tail", "spec.distillation.tail  tail, norm, trunc, sampled  default tail"),
            ("policyloss.type", "gspo: r of the whole sequence"),
            ("stepProgress", "status.stepProgress"),
            ("SetAdvantageIsZero", "(rule 5)"),
            ("setadvantageiszero", "spec.acknowledge"),
            ("TeacherNotReady", "a teacher did not become ready in time"),
            ("TokenizerMismatch", "(rule 11)"),
        ],
    )
    def test_fields_rules_and_words_are_explained(self, name: str, words: str) -> None:
        code, out, _ = opd("explain", name)
        assert (code, words in out) == (0, True), out

    @pytest.mark.parametrize(
        ("name", "guess"),
        [
            ("distillation.tial", "distillation.tail"),
            ("maxConcurrenc", "teachers.maxConcurrency"),
            ("SetAdvantage", "SetAdvantageIsZero"),
        ],
    )
    def test_a_name_that_is_not_known_gets_a_suggestion(self, name: str, guess: str) -> None:
        code, out, err = opd("explain", name)
        assert (code, out) == (1, "")
        assert f"Did you mean {guess}?" in err

    def test_a_last_part_of_several_fields_lists_them(self) -> None:
        code, _, err = opd("explain", "dtype")
        assert (code, "Did you mean student.model.dtype or teachers.model.dtype or" in err) == (1, True), err

    def test_a_name_like_nothing_is_told_where_to_look(self) -> None:
        assert "opd explain spec" in opd("explain", "qqqqqqqqqq")[2]


class TestRender:
    def test_the_children_are_printed_in_the_order_of_their_creation(self, write: Any) -> None:
        code, out, _ = opd("render", write(job_document()), "-n", "team")
        children = list(yaml.safe_load_all(out))
        assert code == 0
        assert children[0]["kind"] == "ConfigMap"
        assert children[-1]["kind"] == "RayJob"
        assert {child["metadata"]["namespace"] for child in children} == {"team"}

    def test_the_configuration_is_printed_as_lines_that_a_person_can_read(self, write: Any) -> None:
        _, out, _ = opd("render", write(job_document()))
        assert "  job.json: |" in out
        assert '\n      "steps": ' in out
        config = next(child for child in yaml.safe_load_all(out) if child["kind"] == "ConfigMap" and "data" in child)
        assert json.loads(config["data"]["job.json"])["training"]["steps"] > 0

    def test_a_refused_job_has_no_children(self, write: Any) -> None:
        code, out, err = opd("render", write(job_document({"spec.storage": {}})))
        assert (code, out) == (1, "")
        assert "spec.storage.claimName" in err

    def test_settings_come_from_the_environment(self, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPD_OPERATOR_TRAINER_IMAGE", "example.com/opd-trainer:7")
        assert "example.com/opd-trainer:7" in opd("render", write(job_document()))[1]
        monkeypatch.setenv("OPD_OPERATOR_NO_SUCH_THING", "1")
        code, _, err = opd("render", write(job_document()))
        assert (code, "OPD_OPERATOR_NO_SUCH_THING" in err) == (1, True)


class TestData:
    def test_the_same_seed_writes_the_same_file(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            assert opd("data", "proxy", "--seed", "7", "--count", "50", "-o", str(tmp_path / "new" / name))[0] == 0
        first = (tmp_path / "new" / "a").read_text()
        assert first == (tmp_path / "new" / "b").read_text()
        records = [json.loads(line) for line in first.splitlines()]
        assert len(records) == 50
        assert {record["data_source"] for record in records} == {"arithmetic", "story"}
        assert len({record["prompt"] for record in records}) > 45
        assert opd("data", "proxy", "--seed", "8", "--count", "50")[1] != first

    def test_a_prefix_does_not_depend_on_the_count(self) -> None:
        assert opd("data", "proxy", "--count", "9")[1].startswith(opd("data", "proxy", "--count", "4")[1])

    def test_answers_are_right(self) -> None:
        out = opd("data", "proxy", "--count", "200")[1]
        for record in map(json.loads, out.splitlines()):
            if record["data_source"] == "arithmetic":
                expression = record["prompt"].removeprefix("Compute ").partition(". Put")[0]
                assert eval(expression) == int(record["answer"]), record


def test_a_command_says_what_this_environment_lacks(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd_cli.environment.find_spec", lambda _: None)
    for command in (["run", write(job_document())], ["report", "."]):
        code, _, err = opd(*command)
        assert code == 2
        assert "make env-trainer" in err


def test_run_hands_file_folder_and_exit_code_through(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def run_local(file: str, *, data: str, fresh: bool) -> int:
        calls.append((file, data, fresh))
        return 75

    module = type(sys)("opd_trainer.local")
    module.run_local = run_local  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opd_trainer.local", module)
    monkeypatch.setattr("opd_cli.environment.find_spec", lambda _: object())
    file = write(job_document())
    assert opd("run", file, "--data", "here", "--fresh")[0] == 75
    assert calls == [(file, "here", True)]


def test_validate_imports_neither_kopf_nor_torch_nor_the_client() -> None:
    program = (
        "import sys; from opd_cli.main import app\n"
        "import opd_cli.validate, opd_cli.explain\n"
        "heavy = {'kopf', 'torch', 'kubernetes', 'ray', 'transformers', 'opd_operator', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_documents_the_exit_codes() -> None:
    out = opd("--help")[1]
    assert "Exit codes" in out
    assert "75 run" in out
