"""For each rule one job that keeps it and one that breaks it: changes to the smallest job, and the path that is blamed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opd_testing.jobs import ABSENT

Changes = dict[str, Any]
D, T = "spec.distillation", "spec.task"
TOPK = {f"{D}.tokenSelection": "teacher_topk", f"{D}.topK": 64}
LOSS = {f"{D}.signal": "loss"}
SET_LOSS = TOPK | LOSS
SECOND = {"name": "code", "model": {"source": "Qwen/Qwen3-Coder"}}
TWO = {"spec.teachers": [{"name": "math", "model": {"source": "Qwen/Qwen3-32B"}}, SECOND]}
MAP = {"spec.routing.map": {"math": "math", "code": "code"}}
EXTERNAL = {"spec.teachers.0": {"name": "teacher", "endpoints": ["http://teacher.example:30000"]}}
CRITIC = {f"{T}.critic": {"model": {"source": "Qwen/Qwen3-0.6B"}}}
REWARD = {f"{T}.reward": "math_verify", f"{T}.taskAdvWeight": 1.0, f"{T}.advantageEstimator": "grpo"}
GAE = REWARD | {f"{T}.advantageEstimator": "gae"} | CRITIC


RAY, ARGS, ARGS_OF_0 = "spec.ray.runtimeEnv", "spec.teachers[0].args", "spec.teachers.0.args"
VOLUMES = "spec.storage.extraVolumes"


def _volumes(*names_and_paths: str) -> Changes:
    """Extra volumes of these names at these paths: name, path, name, path, ..."""
    pairs = zip(names_and_paths[::2], names_and_paths[1::2], strict=True)
    return {VOLUMES: [{"name": name, "mountPath": path, "source": {"emptyDir": {}}} for name, path in pairs]}


@dataclass(frozen=True)
class Example:
    code: str
    path: str
    refused: Changes
    accepted: Changes = field(default_factory=dict)


EXAMPLES = (
    # 1-3: estimators
    Example("SampledK1AsLoss", f"{D}.divergence", LOSS, LOSS | {f"{D}.divergence": "k2"}),
    Example(
        "SampledK1AsLoss", f"{D}.divergence", LOSS | {f"{D}.divergence": "k1"}, LOSS | {f"{D}.straightThrough": True}
    ),
    Example("K3LossIsForwardKl", f"{D}.divergence", LOSS | {f"{D}.divergence": "k3"}, LOSS | {f"{D}.divergence": "k2"}),
    Example(
        "K3AdvantageBiased", f"{D}.divergence", {f"{D}.divergence": "low_var_kl"}, {f"{D}.divergence": "reverse_kl"}
    ),
    Example("AdvantageEstimatorBiased", f"{D}.divergence", {f"{D}.divergence": "abs"}, {f"{D}.divergence": "k1"}),
    Example(
        "AdvantageEstimatorBiased", f"{D}.divergence", {f"{D}.divergence": "mse"}, LOSS | {f"{D}.divergence": "mse"}
    ),
    Example("DivergenceNeedsSet", f"{D}.divergence", {f"{D}.divergence": "jsd"}, SET_LOSS | {f"{D}.divergence": "jsd"}),
    Example("DivergenceNeedsSet", f"{D}.divergence", {f"{D}.divergence": "forward_kl"}),
    Example("DivergenceNeedsSet", f"{D}.divergence", {f"{D}.divergence": "mixed"}),
    Example("EstimatorNeedsSampled", f"{D}.divergence", SET_LOSS | {f"{D}.divergence": "k2"}, SET_LOSS),
    Example("EstimatorNeedsSampled", f"{D}.divergence", SET_LOSS | {f"{D}.divergence": "abs"}),
    Example(
        "FullLowVarKl",
        f"{D}.divergence",
        LOSS | {f"{D}.tokenSelection": "full", f"{D}.divergence": "low_var_kl"},
        LOSS | {f"{D}.tokenSelection": "full", f"{D}.divergence": "forward_kl"},
    ),
    # 4: sets
    Example("TopKMissing", f"{D}.topK", LOSS | {f"{D}.tokenSelection": "union"}, LOSS | TOPK),
    Example("TopKWithoutSet", f"{D}.topK", {f"{D}.topK": 8}),
    Example(
        "TopKOverBackendCap",
        "spec.teachers[0].args",
        SET_LOSS | {"spec.teachers.0.backend": "vllm", "spec.teachers.0.args": ["--max-logprobs", "32"]},
        SET_LOSS | {"spec.teachers.0.backend": "vllm", "spec.teachers.0.args": ["--max-logprobs=64"]},
    ),
    Example(
        "ExternalTopKCap",
        "spec.teachers[0].endpoints",
        SET_LOSS | EXTERNAL | {"spec.teachers.0.backend": "vllm"},
        SET_LOSS | EXTERNAL | {"spec.teachers.0.backend": "vllm", f"{D}.topK": 20},
    ),
    # 5-8: what the gradient is
    Example("SetAdvantageIsZero", f"{D}.signal", TOPK, TOPK | {f"{D}.discountFactor": 0.5}),
    Example("TruncReverseKl", f"{D}.tail", SET_LOSS | {f"{D}.tail": "trunc"}, SET_LOSS | {f"{D}.tail": "tail"}),
    Example("NormReverseKl", f"{D}.tail", SET_LOSS | {f"{D}.tail": "norm"}, SET_LOSS),
    Example(
        "TruncForwardKl",
        f"{D}.tail",
        SET_LOSS | {f"{D}.tail": "trunc", f"{D}.divergence": "forward_kl"},
        SET_LOSS | {f"{D}.divergence": "forward_kl"},
    ),
    Example(
        "SampledTailNeedsStudentTopk",
        f"{D}.tail",
        SET_LOSS | {f"{D}.tail": "sampled"},
        SET_LOSS | {f"{D}.tail": "sampled", f"{D}.tokenSelection": "student_topk"},
    ),
    Example("JsdAlphaRange", f"{D}.jsdAlpha", {f"{D}.jsdAlpha": 1.5}, {f"{D}.jsdAlpha": 1}),
    Example("JsdAlphaRange", f"{D}.jsdAlpha", {f"{D}.jsdAlpha": -0.1}, {f"{D}.jsdAlpha": 0}),
    Example(
        "JsdAlphaNearEnd",
        f"{D}.jsdAlpha",
        SET_LOSS | {f"{D}.divergence": "jsd", f"{D}.jsdAlpha": 0.01},
        SET_LOSS | {f"{D}.divergence": "jsd", f"{D}.jsdAlpha": 0.1},
    ),
    Example("JsdAlphaNearEnd", f"{D}.jsdAlpha", SET_LOSS | {f"{D}.divergence": "jsd", f"{D}.jsdAlpha": 0.99}),
    Example(
        "ProximalAlphaRange",
        f"{D}.proximalTeacherAlpha",
        {f"{D}.proximalTeacherAlpha": 0},
        {f"{D}.proximalTeacherAlpha": 0.2},
    ),
    Example("ProximalAlphaRange", f"{D}.proximalTeacherAlpha", {f"{D}.proximalTeacherAlpha": 1.01}),
    Example(
        "ProximalNeedsSampledAdvantage",
        f"{D}.proximalTeacherAlpha",
        SET_LOSS | {f"{D}.proximalTeacherAlpha": 0.2},
        {f"{D}.proximalTeacherAlpha": 0.2},
    ),
    Example(
        "BaselineWithoutProximal",
        f"{D}.subtractBaseline",
        {f"{D}.subtractBaseline": True},
        {f"{D}.subtractBaseline": True, f"{D}.proximalTeacherAlpha": 0.2},
    ),
    # 9, 10: numbers and sampling
    Example("PerTokenClipRange", f"{D}.perTokenClip", {f"{D}.perTokenClip": 0}, {f"{D}.perTokenClip": 5}),
    Example("ImportanceClipRange", f"{D}.importanceClip", {f"{D}.importanceClip": 1}, {f"{D}.importanceClip": 2}),
    Example("LogProbFloorRange", f"{D}.logProbFloor", {f"{D}.logProbFloor": 0}, {f"{D}.logProbFloor": -20}),
    Example(
        "CorrectionRange",
        "spec.training.rolloutCorrection.low",
        {"spec.training.rolloutCorrection": {"type": "icepop", "low": 2, "high": 2}},
        {"spec.training.rolloutCorrection": {"type": "icepop", "low": 0.5, "high": 2}},
    ),
    Example(
        "TemperatureNotOne",
        "spec.rollout.sampling.temperature",
        {"spec.rollout.sampling.temperature": 0.7},
        {"spec.rollout.sampling.temperature": 1},
    ),
    Example(
        "TruncatedSampling",
        "spec.rollout.sampling.topP",
        {"spec.rollout.sampling.topP": 0.9},
        {"spec.rollout.sampling.topP": 1},
    ),
    Example(
        "TruncatedSampling",
        "spec.rollout.sampling.topK",
        {"spec.rollout.sampling.topK": 20},
        {"spec.rollout.sampling.topK": -1},
    ),
    # 12: context and routing
    Example(
        "ContextTooSmall",
        "spec.teachers[0].maxContextTokens",
        {"spec.teachers.0.maxContextTokens": 5120},
        {"spec.teachers.0.maxContextTokens": 5121},
    ),
    Example("UnknownRoutingTarget", "spec.routing.map.code", TWO | {"spec.routing.map": {"code": "coder"}}, TWO | MAP),
    Example(
        "UnknownRoutingTarget",
        "spec.routing.default",
        {"spec.routing.default": "tutor"},
        {"spec.routing.default": "teacher"},
    ),
    Example("RoutingMissing", "spec.routing", TWO, TWO | MAP),
    Example("RoutingMissing", "spec.routing", TWO, TWO | {"spec.routing.mode": "ensemble"}),
    Example("TeacherNeverRouted", "spec.teachers[1]", TWO | {"spec.routing.default": "math"}, TWO | MAP),
    Example("NotShuffled", "spec.data.shuffle", TWO | MAP | {"spec.data.shuffle": False}, {"spec.data.shuffle": False}),
    # 13: capabilities
    Example(
        "FullNeedsInprocess",
        "spec.teachers[0].backend",
        LOSS | {f"{D}.tokenSelection": "full"},
        LOSS | {f"{D}.tokenSelection": "full", "spec.teachers.0.backend": "inprocess"},
    ),
    Example(
        "SglangWindowTooLarge",
        f"{D}.topK",
        LOSS | {f"{D}.tokenSelection": "student_topk", f"{D}.topK": 129},
        LOSS | {f"{D}.tokenSelection": "student_topk", f"{D}.topK": 128},
    ),
    Example(
        "SglangWindowTooLarge",
        f"{D}.topK",
        LOSS | {f"{D}.tokenSelection": "union", f"{D}.topK": 256},
        LOSS | {f"{D}.tokenSelection": "union", f"{D}.topK": 256, "spec.teachers.0.backend": "vllm"},
    ),
    Example(
        "InprocessWithServer",
        "spec.teachers[0].replicas",
        {
            "spec.teachers.0.backend": "inprocess",
            "spec.teachers.0.replicas": 2,
            "spec.teachers.0.tensorParallelSize": 1,
        },
        {"spec.teachers.0.backend": "inprocess", "spec.teachers.0.tensorParallelSize": 1},
    ),
    Example(
        "InprocessWithServer",
        "spec.teachers[0].endpoints",
        EXTERNAL | {"spec.teachers.0.backend": "inprocess"},
        EXTERNAL,
    ),
    Example("InprocessWithServer", "spec.teachers[0].tensorParallelSize", {"spec.teachers.0.backend": "inprocess"}),
    # 14: task reward
    Example(
        "SequenceLossAggregation",
        "spec.training.lossAggregation",
        {f"{T}.policyLoss.type": "gspo"},
        {f"{T}.policyLoss.type": "sapo", "spec.training.lossAggregation": "seq-mean-token-mean"},
    ),
    Example("GaeNeedsCritic", f"{T}.critic", GAE | {f"{T}.critic": ABSENT}, GAE),
    Example("CriticNeedsGae", f"{T}.critic", CRITIC, GAE),
    Example("TaskWeightNeedsReward", f"{T}.reward", REWARD | {f"{T}.reward": "none"}, REWARD),
    Example("TaskWeightNeedsReward", f"{T}.advantageEstimator", REWARD | {f"{T}.advantageEstimator": "none"}),
    Example(
        "WhitenedTwice",
        f"{D}.whiten",
        GAE | {f"{D}.whiten": "beforeDistillation"},
        REWARD | {f"{D}.whiten": "beforeDistillation"},
    ),
    Example(
        "WhitenedTwice",
        f"{D}.whiten",
        REWARD | {f"{T}.advantageEstimator": "reinforce_plus_plus_baseline", f"{D}.whiten": "beforeDistillation"},
    ),
    Example(
        "WhitenRemovesGap",
        f"{D}.whiten",
        {f"{D}.whiten": "afterDistillation"},
        REWARD | {f"{D}.whiten": "beforeDistillation"},
    ),
    # 15: correction and clips
    Example(
        "CorrectionNeedsTrainLogProbs",
        "spec.training.rolloutCorrection.type",
        {"spec.training.rolloutCorrection.type": "tis", f"{D}.studentLogProbs": "rollout"},
        {"spec.training.rolloutCorrection.type": "tis"},
    ),
    Example(
        "ClipHasNoEffect",
        f"{T}.policyLoss.clipRatioHigh",
        {f"{T}.policyLoss.clipRatioHigh": 0.28},
        {f"{T}.policyLoss.clipRatioHigh": 0.28, "spec.training.updatesPerStep": 4},
    ),
    Example("ClipHasNoEffect", f"{D}.importanceClip", SET_LOSS | {f"{D}.importanceClip": 2}),
    # 16
    Example(
        "EnsembleTopk",
        f"{D}.tokenSelection",
        TWO | SET_LOSS | {"spec.routing.mode": "ensemble"},
        TWO | SET_LOSS | {"spec.routing.mode": "ensemble", f"{D}.tokenSelection": "student_topk"},
    ),
    Example(
        "EnsembleMixedBackends",
        "spec.teachers[1].backend",
        TWO | {"spec.routing.mode": "ensemble", "spec.teachers.1.backend": "inprocess"},
        TWO | {"spec.routing.mode": "ensemble"},
    ),
    # 17, 18
    Example(
        "LearningRateHigh",
        "spec.training.learningRate",
        {"spec.training.learningRate": 1e-4},
        {"spec.training.learningRate": 1e-4, "spec.student.lora": {}},
    ),
    Example("StepsXorEpochs", "spec.training.epochs", {"spec.training.epochs": 1}, {"spec.training": {"epochs": 1}}),
    Example("StepsXorEpochs", "spec.training.steps", {"spec.training": {"gpus": 2}}),
    Example(
        "PartialNeedsStaleness",
        "spec.rollout.partialRollout",
        {"spec.rollout.partialRollout": True},
        {"spec.rollout.partialRollout": True, "spec.rollout.maxStaleness": 1},
    ),
    Example("HalfIdle", "spec.rollout.maxStaleness", {}, {"spec.rollout.maxStaleness": 1}),
    Example(
        "HalfIdle",
        "spec.rollout.maxStaleness",
        {},
        {
            "spec.runtime": {"device": "cpu", "acceleratorResource": "nvidia.com/gpu"},
            "spec.rollout.engine": "transformers",
        },
    ),
    # 19: teachers
    Example("TeacherSource", "spec.teachers[0]", {"spec.teachers.0": {"name": "teacher"}}, EXTERNAL),
    Example("TeacherSource", "spec.teachers[0].model", {"spec.teachers.0.endpoints": ["http://a.example"]}),
    Example(
        "ApiKeyOfManagedTeacher",
        "spec.teachers[0].apiKeySecretRef",
        {"spec.teachers.0.apiKeySecretRef": {"name": "keys", "key": "teacher"}},
        EXTERNAL | {"spec.teachers.0.apiKeySecretRef": {"name": "keys", "key": "teacher"}},
    ),
    Example(
        "DuplicateTeacher",
        "spec.teachers[1].name",
        TWO | {"spec.teachers.1.name": "math", "spec.routing.default": "math"},
        TWO | MAP,
    ),
    # 20-23: names, storage, accelerators, suspension
    Example("JobName", "metadata.name", {"metadata.name": "8b-math"}, {"metadata.name": "math-8b"}),
    Example("JobName", "metadata.name", {"metadata.name": "m" * 41}, {"metadata.name": "m" * 40}),
    Example("ClaimMissing", "spec.storage.claimName", {"spec.storage": {}}),
    *(
        Example("StoragePath", f"spec.storage.{name}", {f"spec.storage.{name}": value})
        for name, values in {
            "mountPath": ("data", "", "/", "/data/../x", "/a:b"),
            "runPath": ("/abs", "", " ", "..", "a/../../b"),
        }.items()
        for value in values
    ),
    Example("StoragePath", f"{VOLUMES}[0].mountPath", _volumes("x", "cache/x"), _volumes("x", "/cache/x")),
    Example("VolumeCollides", "spec.storage.mountPath", {"spec.storage.mountPath": "/tmp/"}),
    Example("VolumeCollides", f"{VOLUMES}[0].name", _volumes("data", "/x"), _volumes("cache", "/x")),
    Example("VolumeCollides", f"{VOLUMES}[1].name", _volumes("x", "/x", "x", "/y"), _volumes("x", "/x", "y", "/y")),
    Example("VolumeCollides", f"{VOLUMES}[0].mountPath", _volumes("x", "/data"), _volumes("x", "/data/x")),
    Example(
        "CpuTensorParallel",
        "spec.teachers[0].tensorParallelSize",
        {"spec.runtime.device": "cpu"},
        {"spec.runtime.device": "cpu", "spec.teachers.0.tensorParallelSize": 1},
    ),
    Example(
        "CpuNccl",
        "spec.training.weightSync",
        {"spec.runtime.device": "cpu", "spec.training.weightSync": "nccl"},
        {"spec.runtime.device": "cpu"},
    ),
    Example(
        "EngineOverWorker",
        "spec.ray.workers.gpusPerWorker",
        {"spec.rollout.tensorParallelSize": 8, "spec.ray.workers.gpusPerWorker": 4},
        {"spec.rollout.tensorParallelSize": 4, "spec.ray.workers.gpusPerWorker": 4},
    ),
    Example("SuspendLosesWork", "spec.suspend", {"spec.suspend": True}),
    # 24-26
    Example(
        "NoAdapter",
        "spec.teachers[0].backend",
        LOSS | {f"{D}.tokenSelection": "student_topk", f"{D}.topK": 8, "spec.teachers.0.backend": "lmdeploy"},
        SET_LOSS | {"spec.teachers.0.backend": "lmdeploy"},
    ),
    Example(
        "HasNoEffect",
        f"{D}.discountFactor",
        SET_LOSS | {f"{D}.discountFactor": 0.5},
        TOPK | {f"{D}.discountFactor": 0.5},
    ),
    Example("HasNoEffect", "spec.teachers[0].args", EXTERNAL | {"spec.teachers.0.args": ["--x"]}, EXTERNAL),
    # 27: secrets
    Example(
        "SecretInLiteral",
        "spec.runtime.env[1].value",
        {
            "spec.runtime.env": [
                {"name": "TOKENIZERS_PARALLELISM", "value": "true"},
                {"name": "HF_TOKEN", "value": "hf"},
            ]
        },
        {"spec.runtime.env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]},
    ),
    Example("SecretInLiteral", "spec.ray.runtimeEnv", {"spec.ray.runtimeEnv": {"env_vars": {"WANDB_API_KEY": "x"}}}),
    Example("SecretInLiteral", f"{ARGS}[0]", {ARGS_OF_0: ["--api-key", "x"]}, {ARGS_OF_0: ["--max-token-length=5"]}),
    Example("SecretInLiteral", f"{ARGS}[0]", {ARGS_OF_0: ["--admin-api-key=x"]}, {ARGS_OF_0: ["x--api-key"]}),
    Example(
        "SecretInLiteral",
        "spec.teachers[0].endpoints[0]",
        {"spec.teachers.0": {"name": "teacher", "endpoints": ["https://me:secret@teacher.example/v1"]}},
        {"spec.teachers.0": {"name": "teacher", "endpoints": ["https://teacher.example/@v1"]}},
    ),
    *(
        Example("RuntimeEnvVariables", RAY, {RAY: {"env_vars": bad}}, {RAY: {"env_vars": {"A": "1"}}})
        for bad in (None, ["A=1"], {"A": 1})
    ),
)

#: A change for each row of UNREAD (opd_api.rules.effect) that writes the value where nothing reads it.
UNREAD_EXAMPLES: dict[str, Changes] = {
    f"{D}.straightThrough": {f"{D}.straightThrough": True},
    f"{D}.importanceClip": {f"{D}.importanceClip": 2},
    f"{D}.tail": {f"{D}.tail": "norm"},
    f"{D}.jsdAlpha": {f"{D}.jsdAlpha": 0.3},
    f"{D}.mixedForwardWeight": {f"{D}.mixedForwardWeight": 0.3},
    f"{D}.discountFactor": SET_LOSS | {f"{D}.discountFactor": 0.5},
    f"{D}.subtractBaseline": SET_LOSS | {f"{D}.subtractBaseline": True},
    f"{D}.whiten": {f"{D}.whiten": "beforeDistillation"},
    "spec.routing.map": TWO | MAP | {"spec.routing.mode": "ensemble"},
    f"{T}.advantageEstimator": {f"{T}.advantageEstimator": "grpo", f"{T}.reward": "math_verify"},
}

#: A change for each row of NOT_YET (opd_api.rules.not_yet), by path.
NOT_YET_EXAMPLES: dict[str, Changes] = {
    "spec.training.weightSync": {"spec.training.weightSync": "nccl"},
}
