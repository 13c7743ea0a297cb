"""Command line and environment of a student's SGLang 0.5.23 server, and its `/generate`. Pure."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd_api.v1alpha1 import Device
from opd_trainer.interfaces import GenerateResult
from opd_trainer.rollout.engines.replica import ReplicaSettings
from opd_trainer.sample import TokenSet, VersionSpan

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: KV tokens on a CPU; without a bound the pool takes most of the machine's memory.
CPU_KV_TOKENS = 16_384
FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "abort"}


class AnswerError(Exception):
    """The server's answer does not hold what it must."""


def launch_command(settings: ReplicaSettings, *, weights: str, version: int, port: int) -> list[str]:
    """Arguments of the server; it listens on loopback only, so it needs no key. The tokenizer lies beside the weights."""
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        weights,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--context-length",
        str(settings.context),
        "--weight-version",
        str(version),
        "--random-seed",
        str((settings.seed * 1009 + settings.index) % 2**31),
        "--max-running-requests",
        str(settings.max_batch),
        "--tp-size",
        str(settings.tensor_parallel_size),
        "--log-level",
        "warning",
        "--skip-server-warmup",
    ]
    if settings.trust_remote_code:
        command.append("--trust-remote-code")
    if settings.device is Device.CPU:
        tokens = max(CPU_KV_TOKENS, 2 * settings.context)
        command += ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", str(tokens)]
        command += [
            "--attention-backend",
            "torch_native",
            "--sampling-backend",
            "pytorch",
            "--disable-overlap-schedule",
        ]
        return command
    return [*command, "--dtype", DTYPES[settings.dtype], "--enable-fp32-lm-head"]


def server_environment(settings: ReplicaSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of the server, made from the actor's."""
    env = {
        name: value
        for name, value in environ.items()
        # Raw log-probabilities would not be those of the distribution that is sampled.
        if name != "SGLANG_RETURN_ORIGINAL_LOGPROB"
        # Ray sets it to the actor's CPU share.
        and name != "OMP_NUM_THREADS"
    }
    # /health must stay a sign of life that a long batch cannot delay.
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    if settings.device is Device.CPU:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        env["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    return env


def generate_body(
    settings: ReplicaSettings, prompt_ids: NDArray[np.int32], max_tokens: int, top_k: int, end_ids: frozenset[int]
) -> dict[str, Any]:
    """Body of one rollout."""
    sampling = settings.sampling
    return {
        "input_ids": prompt_ids,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "max_new_tokens": max_tokens,
            "stop_token_ids": sorted(end_ids),
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "top_logprobs_num": top_k,
        "stream": False,
    }


def parse_generation(document: dict[str, Any], top_k: int, version: int) -> GenerateResult:
    """The result from an answer. Raises AnswerError."""
    try:
        meta = document["meta_info"]
        rows = meta["output_token_logprobs"]
        reason = FINISH_REASONS[meta["finish_reason"]["type"]]
        ids = np.array([row[1] for row in rows], dtype=np.int32)
        logprobs = np.array([row[0] for row in rows], dtype=np.float32)
        topk = _token_set(meta["output_top_logprobs"][: len(rows)], len(rows), top_k) if top_k else None
        spans = _spans(meta.get("weight_versions"), len(rows), version)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise AnswerError(f"unexpected answer of /generate: {type(error).__name__}: {error}") from None
    if not np.isfinite(logprobs).all():
        raise AnswerError("a log-probability of the response is not finite")
    return GenerateResult(ids, logprobs, reason, spans, topk)


def _token_set(rows: list[list[list[Any]]], count: int, top_k: int) -> TokenSet:
    ids = np.zeros((count, top_k), np.int32)
    logprobs = np.zeros((count, top_k), np.float32)
    for position, row in enumerate(rows):
        ids[position] = [entry[1] for entry in row[:top_k]]
        logprobs[position] = [entry[0] for entry in row[:top_k]]
    if len(rows) != count:
        raise ValueError(f"{len(rows)} rows of top log-probabilities for {count} tokens")
    return TokenSet(ids, logprobs, np.isfinite(logprobs))


def _spans(reported: Any, count: int, version: int) -> tuple[VersionSpan, ...]:
    """The server's own spans where they are numbers; one span of the current version otherwise."""
    if not count:
        return ()
    if isinstance(reported, list) and reported and all(str(item["version"]).isdigit() for item in reported):
        spans = [VersionSpan(int(item["version"]), int(item["start"]), int(item["end"])) for item in reported]
        spans = [span for span in spans if span.end > span.start]
        if spans and spans[0].start == 0 and spans[-1].end == count:
            return tuple(spans)
    return (VersionSpan(version, 0, count),)
