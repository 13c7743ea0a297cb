"""The student's SGLang server: its command line, and what is read from its answers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opd_testing.configs import trainer_config
from opd_testing.tiny_models import write_model

from opd_api.v1alpha1 import Device
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.rollout.engines import replica_settings
from opd_trainer.rollout.engines.processes import EngineProcess
from opd_trainer.rollout.engines.replica import ReplicaSettings
from opd_trainer.rollout.engines.sglang_command import (
    AnswerError,
    generate_body,
    launch_command,
    parse_generation,
    server_environment,
)
from opd_trainer.rollout.engines.sglang_engine import SglangReplica
from opd_trainer.sample import VersionSpan


def settings(tmp_path: Path, device: str = "cpu") -> ReplicaSettings:
    config = trainer_config(
        tmp_path,
        runtime={"device": device},
        rollout={"engine": "sglang", "sampling": {"temperature": 0.7}},
        student="/models/student",
    )
    return replica_settings(config, 2)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_server_listens_on_loopback_with_the_weights_and_version_of_the_moment(tmp_path: Path) -> None:
    command = launch_command(settings(tmp_path), weights="/w/v3", version=3, port=21000)
    assert option(command, "--host") == "127.0.0.1"
    assert option(command, "--model-path") == "/w/v3"
    assert option(command, "--weight-version") == "3"
    assert option(command, "--context-length") == str(64 + 32 + 1)


def test_nothing_that_an_engine_reads_is_named_by_a_hub_id(tmp_path: Path) -> None:
    """A hub id without its revision means another model, or one that was never downloaded; the weights' folder is whole."""
    config = trainer_config(tmp_path, student="org/student", rollout={"engine": "sglang"})
    model = config.student.model.model_copy(update={"revision": "v2"})
    config = config.model_copy(update={"student": config.student.model_copy(update={"model": model})})
    given = replica_settings(config, 0)
    assert "org/student" not in repr(given)
    command = launch_command(given, weights="/w/v3", version=3, port=21000)
    assert not [word for word in command if "org/student" in word]
    assert "--tokenizer-path" not in command, "the server takes it from --model-path"


async def test_an_image_without_sglang_is_a_fault_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_server(*_: Any) -> EngineProcess:
        raise OSError("a server that cannot run was launched")

    monkeypatch.setattr(EngineProcess, "launch", no_server)
    monkeypatch.setitem(sys.modules, "sglang", None)
    failure = await SglangReplica(settings(tmp_path)).start(str(write_model(tmp_path / "w")), 0)
    assert failure is not None
    assert (failure.failure_class, failure.reason) == (FailureClass.CONFIG, Reason.CONFIG_ERROR)
    assert "--build-arg LOCK=trainer-sglang-image" in failure.message
    assert "runtime.image" in failure.message


def test_a_cpu_server_is_bounded_in_memory_and_a_gpu_server_keeps_its_own_choices(tmp_path: Path) -> None:
    cpu = launch_command(settings(tmp_path), weights="/w", version=0, port=21000)
    assert option(cpu, "--device") == "cpu"
    assert option(cpu, "--attention-backend") == "torch_native"
    assert "--max-total-tokens" in cpu
    gpu = launch_command(settings(tmp_path, "cuda"), weights="/w", version=0, port=21000)
    assert "--max-total-tokens" not in gpu
    assert "--attention-backend" not in gpu
    assert settings(tmp_path, "cuda").device is Device.CUDA


def test_the_environment_asks_for_log_probabilities_of_what_is_sampled(tmp_path: Path) -> None:
    given = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "OMP_NUM_THREADS": "1", "KEEP": "me"}
    env = server_environment(settings(tmp_path), given)
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" not in env
    assert env["KEEP"] == "me"
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"


def test_every_end_token_is_named_in_the_request(tmp_path: Path) -> None:
    body = generate_body(settings(tmp_path), np.array([5], np.int32), 9, 2, frozenset({7, 1}))
    sampling = body["sampling_params"]
    assert sampling["stop_token_ids"] == [1, 7]
    assert (sampling["max_new_tokens"], sampling["temperature"], body["top_logprobs_num"]) == (9, 0.7, 2)


def test_an_attempt_looks_for_what_the_attempt_before_it_left(tmp_path: Path) -> None:
    first = settings(tmp_path)
    second = replace(first, log_directory=first.log_directory.with_name("attempt-2"))
    assert SglangReplica(first)._record == SglangReplica(second)._record


def answer(**more: Any) -> dict[str, Any]:
    return {
        "output_ids": [8, 1],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 1},
            "output_token_logprobs": [[-0.5, 8, None], [-1.5, 1, None]],
            "output_top_logprobs": [[[-0.5, 8, None], [-2.0, 9, None]], [[-0.2, 4, None], [-1.5, 1, None]]],
            "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
            **more,
        },
    }


def test_tokens_log_probabilities_and_spans_are_read() -> None:
    result = parse_generation(answer(), 2, 9)
    assert result.response_ids.tolist() == [8, 1]
    assert result.logprobs.tolist() == [-0.5, -1.5]
    assert result.finish_reason == "stop"
    assert result.version_spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
    assert result.topk is not None
    assert result.topk.ids.tolist() == [[8, 9], [4, 1]]


def test_without_usable_spans_the_current_version_covers_the_response() -> None:
    for reported in (
        None,
        [],
        [{"version": "default", "start": 0, "end": 2}],
        [{"version": "3", "start": 0, "end": 1}],
    ):
        assert parse_generation(answer(weight_versions=reported), 0, 9).version_spans == (VersionSpan(9, 0, 2),)


def test_an_aborted_request_may_have_written_nothing() -> None:
    meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [], "output_top_logprobs": []}
    result = parse_generation({"output_ids": [], "meta_info": meta}, 2, 9)
    assert (result.finish_reason, len(result.response_ids), result.version_spans) == ("abort", 0, ())
    assert result.topk is not None
    assert result.topk.ids.shape == (0, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"output_token_logprobs": None},
        {"output_token_logprobs": [[None, 8, None], [-1.0, 1, None]]},
        {"finish_reason": {"type": "surprise"}},
        {"output_top_logprobs": [[[-0.5, 8, None]]]},
    ],
)
def test_answers_that_lack_something_are_errors(change: dict[str, Any]) -> None:
    with pytest.raises(AnswerError):
        parse_generation(answer(**change), 2, 9)
