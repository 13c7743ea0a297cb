"""Rules that the API server itself enforces, as CEL: the structural rows of opd_api.rules and the immutability of a started job.

Each rule sits at the deepest object that holds all it needs: there defaults are filled in, whereas an absent section has no
fields at all. CEL cannot look into pod templates, and an expression that fails to evaluate refuses writes of the status too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from opd_api.rules.cluster import NAME_LIMIT, NAME_PATTERN
from opd_api.rules.teachers import SGLANG_MAX_IDS, SGLANG_WINDOW
from opd_api.v1alpha1 import (
    SAMPLED_ESTIMATOR,
    SET_SELECTIONS,
    Divergence,
    OPDJobSpec,
    Teacher,
    TemplatedPlacement,
    TokenSelection,
)


@dataclass(frozen=True, slots=True)
class Validation:
    """One entry of x-kubernetes-validations."""

    #: Code of the rule in opd_api.rules; Immutable for transition rules.
    code: str
    rule: str
    message: str
    #: JSON path below the object that is blamed; empty for the object itself.
    field: str = ""

    def to_schema(self) -> dict[str, str]:
        """As it stands in the CRD."""
        entry = {"rule": self.rule, "message": f"{self.code}: {self.message}"}
        if self.field:
            entry["fieldPath"] = f".{self.field}"
        return entry


def _list(names: object) -> str:
    return "[" + ", ".join(f"'{name}'" for name in names) + "]"  # type: ignore[attr-defined]


IMMUTABLE = "Immutable"
_SETS = _list(item.value for item in TokenSelection if item in SET_SELECTIONS)
_SAMPLED = "self.tokenSelection == 'student_sampled'"
_IN_SETS = f"self.tokenSelection in {_SETS}"
_ONLY_SETS = _list(item.value for item in Divergence if item not in SAMPLED_ESTIMATOR)
_ON_SETS = _list(["reverse_kl", "forward_kl", "jsd", "mixed", "low_var_kl"])
_K1 = _list(name.value for name, estimator in SAMPLED_ESTIMATOR.items() if estimator is Divergence.K1)
_STUDENT_SETS = "['student_topk', 'union', 'intersection']"
_SELECTION = "self.?distillation.?tokenSelection.orValue('student_sampled')"
_ENSEMBLE = "self.?routing.?mode.orValue('route') == 'ensemble'"
_CPU = "self.?runtime.?device.orValue('cuda') == 'cpu'"
_ESTIMATOR = "self.?task.?advantageEstimator.orValue('none')"

_DISTILLATION = (
    Validation(
        "SampledK1AsLoss",
        f"!(self.signal == 'loss' && {_SAMPLED} && self.divergence in {_K1} && !self.straightThrough)",
        "the teacher drops out of the gradient of this loss; write signal: advantage or divergence: k2",
        "divergence",
    ),
    Validation(
        "DivergenceNeedsSet",
        f"!({_SAMPLED} && self.divergence in {_ONLY_SETS})",
        "this divergence needs more than the sampled token; write tokenSelection: teacher_topk with a topK",
        "divergence",
    ),
    Validation(
        "EstimatorNeedsSampled",
        f"{_SAMPLED} || self.divergence in {_ON_SETS}",
        f"this estimator is for tokenSelection: student_sampled; on sets write one of {_ON_SETS}".replace("'", ""),
        "divergence",
    ),
    Validation(
        "FullLowVarKl",
        "!(self.tokenSelection == 'full' && self.divergence == 'low_var_kl')",
        "over the whole vocabulary write divergence: forward_kl",
        "divergence",
    ),
    Validation("TopKMissing", f"!({_IN_SETS}) || has(self.topK)", "this tokenSelection needs a topK, such as 64"),
    Validation(
        "TopKWithoutSet",
        f"{_IN_SETS} || !has(self.topK)",
        "this tokenSelection keeps no set; remove topK or write tokenSelection: teacher_topk",
        "tokenSelection",
    ),
    Validation(
        "SampledTailNeedsStudentTopk",
        "self.tail != 'sampled' || (self.signal == 'loss' && self.tokenSelection == 'student_topk'"
        " && self.divergence == 'reverse_kl')",
        "tail: sampled is for signal: loss, tokenSelection: student_topk, divergence: reverse_kl; write tail: tail",
        "tail",
    ),
    Validation(
        "JsdAlphaRange", "self.jsdAlpha >= 0.0 && self.jsdAlpha <= 1.0", "write a value from 0 to 1", "jsdAlpha"
    ),
    Validation(
        "ProximalAlphaRange",
        "self.proximalTeacherAlpha > 0.0 && self.proximalTeacherAlpha <= 1.0",
        "write a value greater than 0, up to 1",
        "proximalTeacherAlpha",
    ),
    Validation(
        "ProximalNeedsSampledAdvantage",
        f"self.proximalTeacherAlpha == 1.0 || (self.signal == 'advantage' && {_SAMPLED})",
        "the proximal teacher is for signal: advantage with tokenSelection: student_sampled",
        "proximalTeacherAlpha",
    ),
    Validation(
        "PerTokenClipRange", "!has(self.perTokenClip) || self.perTokenClip > 0.0", "perTokenClip must be greater than 0"
    ),
    Validation(
        "ImportanceClipRange",
        "!has(self.importanceClip) || self.importanceClip > 1.0",
        "importanceClip must be greater than 1",
    ),
    Validation(
        "LogProbFloorRange", "!has(self.logProbFloor) || self.logProbFloor < 0.0", "logProbFloor must be less than 0"
    ),
)

_TASK = (
    Validation(
        "GaeNeedsCritic",
        "self.advantageEstimator != 'gae' || has(self.critic)",
        "advantageEstimator: gae needs critic: {model: {source: ...}}",
    ),
    Validation(
        "CriticNeedsGae",
        "self.advantageEstimator == 'gae' || !has(self.critic)",
        "nothing reads the critic; remove it or write advantageEstimator: gae",
        "advantageEstimator",
    ),
    Validation(
        "TaskWeightNeedsReward",
        "self.taskAdvWeight == 0.0 || (self.reward != 'none' && self.advantageEstimator != 'none')",
        "taskAdvWeight needs a reward and an advantageEstimator",
        "taskAdvWeight",
    ),
)

_TEACHER = (
    Validation(
        "TeacherSource",
        "has(self.model) != (has(self.endpoints) && size(self.endpoints) > 0)",
        "write exactly one of model (we serve it) and endpoints (somebody else does)",
    ),
    Validation(
        "ApiKeyOfManagedTeacher",
        "!has(self.apiKeySecretRef) || (has(self.endpoints) && size(self.endpoints) > 0)",
        "the operator makes the key of a teacher that it serves; remove apiKeySecretRef",
    ),
    Validation(
        "InprocessWithServer",
        "self.backend != 'inprocess' || (self.replicas == 1 && self.tensorParallelSize == 1"
        " && (!has(self.endpoints) || size(self.endpoints) == 0))",
        "an inprocess teacher lives in the learner; remove endpoints, replicas and tensorParallelSize",
        "backend",
    ),
)

_SPEC = (
    Validation(
        "ClaimMissing",
        "has(self.storage) && has(self.storage.claimName)",
        "write storage: {claimName: <a ReadWriteMany PersistentVolumeClaim of this namespace>}",
    ),
    Validation(
        "ContextTooSmall",
        "self.teachers.all(t, !has(t.maxContextTokens) || t.maxContextTokens >="
        " self.data.maxPromptTokens + self.?rollout.?maxResponseTokens.orValue(4096) + 1)",
        "data.maxPromptTokens + rollout.maxResponseTokens + 1 must fit into every teacher's maxContextTokens",
        "teachers",
    ),
    Validation(
        "UnknownRoutingTarget",
        "!has(self.routing) || ((!has(self.routing.map) || self.routing.map.all(key,"
        " self.teachers.exists(t, t.name == self.routing.map[key]))) && (!has(self.routing.default) ||"
        " self.teachers.exists(t, t.name == self.routing.default)))",
        "routing.map and routing.default must name teachers of this job",
        "routing",
    ),
    Validation(
        "RoutingMissing",
        f"size(self.teachers) == 1 || {_ENSEMBLE} || (has(self.routing) && ((has(self.routing.map) &&"
        " size(self.routing.map) > 0) || has(self.routing.default)))",
        "several teachers need routing.map, routing.default or routing.mode: ensemble",
    ),
    Validation(
        "FullNeedsInprocess",
        f"{_SELECTION} != 'full' || self.teachers.all(t, t.backend == 'inprocess')",
        "no server sends its whole vocabulary; write backend: inprocess or tokenSelection: teacher_topk",
        "teachers",
    ),
    Validation(
        "NoAdapter",
        f"!({_SELECTION} in {_STUDENT_SETS}) || self.teachers.all(t, t.backend != 'lmdeploy')",
        "lmdeploy takes no ids to score; write tokenSelection: teacher_topk or another backend",
        "teachers",
    ),
    Validation(
        "SglangWindowTooLarge",
        f"!({_SELECTION} in {_STUDENT_SETS}) || self.?distillation.?topK.orValue(1) * {SGLANG_WINDOW} <= {SGLANG_MAX_IDS}"
        " || self.teachers.all(t, t.backend != 'sglang')",
        f"SGLang scores at most {SGLANG_MAX_IDS // SGLANG_WINDOW} ids a position; write a smaller topK or backend: vllm",
        "teachers",
    ),
    Validation(
        "EnsembleTopk",
        f"!({_ENSEMBLE}) || !({_SELECTION} in ['teacher_topk', 'union', 'intersection'])",
        "the best tokens of an ensemble differ; write tokenSelection: student_topk or student_sampled",
    ),
    Validation(
        "EnsembleMixedBackends",
        f"!({_ENSEMBLE}) || self.teachers.all(t, t.backend == 'inprocess') || self.teachers.all(t, t.backend != 'inprocess')",
        "scores of servers and of teachers inside the learner are not mixed; write backend: inprocess for all or for none",
        "teachers",
    ),
    Validation(
        "SequenceLossAggregation",
        "!(self.?task.?policyLoss.?type.orValue('vanilla') in ['gspo', 'sapo'])"
        " || self.training.lossAggregation == 'seq-mean-token-mean'",
        "gspo and sapo need lossAggregation: seq-mean-token-mean",
        "training",
    ),
    Validation(
        "WhitenedTwice",
        "self.?distillation.?whiten.orValue('none') != 'beforeDistillation' ||"
        f" !({_ESTIMATOR} in ['gae', 'reinforce_plus_plus', 'reinforce_plus_plus_baseline'])",
        "this advantageEstimator whitens already; write whiten: none",
    ),
    Validation(
        "CorrectionNeedsTrainLogProbs",
        "self.?training.?rolloutCorrection.?type.orValue('none') == 'none' ||"
        " self.?distillation.?studentLogProbs.orValue('train') == 'train'",
        "rolloutCorrection needs studentLogProbs: train",
        "training",
    ),
    Validation(
        "CpuTensorParallel",
        f"!({_CPU}) || (self.?rollout.?tensorParallelSize.orValue(1) == 1 && self.teachers.all(t,"
        " t.tensorParallelSize == 1 || has(t.endpoints)))",
        "device: cpu cannot split a model; write tensorParallelSize: 1",
    ),
    Validation(
        "CpuNccl", f"!({_CPU}) || self.training.weightSync == 'disk'", "NCCL needs GPUs; write weightSync: disk"
    ),
)

#: Teacher fields that may change while a job runs: they act at the next attempt.
_MUTABLE_OF_TEACHER = frozenset({*TemplatedPlacement.model_fields, "args", "image"})
_MUTABLE_OF_TEACHER_IN_YAML = frozenset(Teacher.model_fields[name].alias or name for name in _MUTABLE_OF_TEACHER)
IMMUTABLE_SECTIONS = ("student", "routing", "distillation", "task", "data", "rollout", "training")
#: Further volumes may change.
IMMUTABLE_OF_STORAGE = ("claimName", "mountPath", "runPath")


def may_change(path: str) -> bool:
    """Whether this field of a started job may still be edited. `path`: as in a finding, spec.teachers[0].args."""
    match re.findall(r"[^.\[\]]+", path):
        case ["spec", "teachers", _, field, *_]:
            return field in _MUTABLE_OF_TEACHER_IN_YAML
        case ["spec", "storage", field, *_]:
            return field not in IMMUTABLE_OF_STORAGE
        case ["spec", section, *_]:
            return section not in (*IMMUTABLE_SECTIONS, "teachers", "storage")
    return False


_NOT_STARTED = "!has(oldSelf.status) || !has(oldSelf.status.startTime)"


def _same(new: str, old: str, field: str, *, always_there: bool) -> str:
    """Equality of a field of two objects. Not `new.?field == old.?field`: the API server cannot estimate its cost."""
    if always_there:
        return f"{new}.{field} == {old}.{field}"
    return f"(has({new}.{field}) == has({old}.{field}) && (!has({new}.{field}) || {new}.{field} == {old}.{field}))"


def _immutable(section: str) -> Validation:
    required = OPDJobSpec.model_fields[section].is_required()
    return Validation(
        IMMUTABLE,
        f"{_NOT_STARTED} || {_same('self.spec', 'oldSelf.spec', section, always_there=required)}",
        f"spec.{section} cannot change once the job has started; make a new OPDJob",
    )


def _immutable_storage() -> Validation:
    """Where the checkpoints are: the next attempt would look for them elsewhere and begin again."""
    new, old = "self.spec.storage", "oldSelf.spec.storage"
    same = " && ".join(_same(new, old, name, always_there=name != "claimName") for name in IMMUTABLE_OF_STORAGE)
    return Validation(
        IMMUTABLE,
        f"{_NOT_STARTED} || (has({new}) == has({old}) && (!has({new}) || ({same})))",
        f"{', '.join(IMMUTABLE_OF_STORAGE)} of spec.storage cannot change once the job has started; make a new OPDJob",
    )


def _immutable_teachers() -> Validation:
    """Every teacher has an equal one of its name before, and there are as many (names are unique: the list is a map)."""
    conditions = []
    for name, field in Teacher.model_fields.items():
        if name not in _MUTABLE_OF_TEACHER:
            static = field.is_required() or (field.default is not None and field.default_factory is None)
            conditions.append(_same("t", "o", field.alias or name, always_there=static))
    return Validation(
        IMMUTABLE,
        f"{_NOT_STARTED} || (size(self.spec.teachers) == size(oldSelf.spec.teachers)"
        f" && self.spec.teachers.all(t, oldSelf.spec.teachers.exists(o, {' && '.join(conditions)})))",
        "spec.teachers cannot change once the job has started, except placement, args, image and template; make a new OPDJob",
    )


_ROOT = (
    Validation(
        "JobName",
        f"size(self.metadata.name) <= {NAME_LIMIT} && self.metadata.name.matches('{NAME_PATTERN}')",
        f"metadata.name has at most {NAME_LIMIT} lower-case letters, digits and '-', a letter first and no '-' last",
    ),
    *(_immutable(section) for section in IMMUTABLE_SECTIONS),
    _immutable_storage(),
    _immutable_teachers(),
)

#: Path of an object in the schema (dots, [] for list items) -> its rules. The empty path is the whole object.
VALIDATIONS: Mapping[str, tuple[Validation, ...]] = MappingProxyType(
    {
        "": _ROOT,
        "spec": _SPEC,
        "spec.distillation": _DISTILLATION,
        "spec.task": _TASK,
        "spec.teachers[]": _TEACHER,
        "spec.training": (
            Validation(
                "StepsXorEpochs", "has(self.steps) != has(self.epochs)", "write exactly one of steps and epochs"
            ),
        ),
        "spec.training.rolloutCorrection": (
            Validation("CorrectionRange", "!has(self.low) || self.low < self.high", "low must be lower than high"),
        ),
        "spec.rollout": (
            Validation(
                "PartialNeedsStaleness",
                "!self.partialRollout || self.maxStaleness > 0",
                "partialRollout needs maxStaleness of at least 1",
                "partialRollout",
            ),
        ),
        "spec.rollout.sampling": (
            Validation(
                "TruncatedSampling",
                "self.topP >= 1.0 && self.topK <= 0",
                "write topP: 1 and topK: -1, or the log-probabilities are not those of the policy that wrote the tokens",
            ),
        ),
    }
)

#: Codes of rules that make `kubectl apply` fail; names of teachers are unique because the list is a map.
AT_APPLY = frozenset({item.code for items in VALIDATIONS.values() for item in items} - {IMMUTABLE}) | {
    "DuplicateTeacher"
}
