"""Rules 4, 12, 13, 16, 19 and 24: which teacher can score what, and for whom."""

from __future__ import annotations

from collections import Counter

from opd_api.rules.finding import Hits, Level, rule
from opd_api.v1alpha1 import OPDJob, RoutingMode, Teacher, TeacherBackend, TokenSelection

#: vLLM refuses more log-probabilities per position than this unless its --max-logprobs is raised.
VLLM_MAX_LOGPROBS = 20
#: A stock SGLang takes one list of ids a request: windows of so many positions, and at most so many ids.
SGLANG_WINDOW = 128
SGLANG_MAX_IDS = 16_384

_SERVED = frozenset(TokenSelection) - {TokenSelection.FULL}
#: Token selections that each backend can score.
CAPABILITIES: dict[TeacherBackend, frozenset[TokenSelection]] = {
    TeacherBackend.SGLANG: _SERVED,
    TeacherBackend.VLLM: _SERVED,
    TeacherBackend.TRANSFORMERS: _SERVED,
    TeacherBackend.LMDEPLOY: frozenset({TokenSelection.STUDENT_SAMPLED, TokenSelection.TEACHER_TOPK}),
    TeacherBackend.INPROCESS: frozenset(TokenSelection),
}
#: Selections for which the teacher scores the student's tokens.
STUDENT_SETS = frozenset({TokenSelection.STUDENT_TOPK, TokenSelection.UNION, TokenSelection.INTERSECTION})
#: Selections that need the teacher's own best tokens, which an ensemble does not have in common.
TEACHER_SETS = frozenset({TokenSelection.TEACHER_TOPK, TokenSelection.UNION, TokenSelection.INTERSECTION})


def _enumerated(job: OPDJob) -> list[tuple[str, Teacher]]:
    return [(f"spec.teachers[{index}]", teacher) for index, teacher in enumerate(job.spec.teachers)]


def _max_logprobs(args: list[str]) -> int | None:
    """Value of --max-logprobs in a vLLM command line; None when it is not there or not a number."""
    for index, argument in enumerate(args):
        name, _, value = argument.partition("=")
        if name.replace("_", "-") == "--max-logprobs":
            text = value or (args[index + 1] if index + 1 < len(args) else "")
            return int(text) if text.lstrip("-").isdigit() else None
    return None


@rule(4, "TopKOverBackendCap", Level.ERROR, "topK is within what the teacher returns")
def top_k_over_backend_cap(job: OPDJob) -> Hits:
    wanted = job.spec.distillation.top_k
    if wanted is None:
        return
    for path, teacher in _enumerated(job):
        cap = _max_logprobs(teacher.args) if teacher.backend is TeacherBackend.VLLM and not teacher.external else None
        if cap is not None and 0 <= cap < wanted:
            yield (
                f"{path}.args",
                f"--max-logprobs {cap} is less than topK {wanted}. Remove it (the operator raises it as needed), or write "
                f"topK: {cap}.",
            )


@rule(4, "ExternalTopKCap", Level.WARNING, "an external vLLM may return fewer than topK tokens")
def external_top_k_cap(job: OPDJob) -> Hits:
    wanted = job.spec.distillation.top_k
    if wanted is None or wanted <= VLLM_MAX_LOGPROBS:
        return
    for path, teacher in _enumerated(job):
        if teacher.external and teacher.backend is TeacherBackend.VLLM:
            yield (
                f"{path}.endpoints",
                f"vLLM returns at most {VLLM_MAX_LOGPROBS} tokens unless it was started with --max-logprobs {wanted}. Start it "
                f"so, or write topK: {VLLM_MAX_LOGPROBS}.",
            )


@rule(12, "ContextTooSmall", Level.ERROR, "prompt and response fit into the teacher")
def context_too_small(job: OPDJob) -> Hits:
    needed = job.spec.data.max_prompt_tokens + job.spec.rollout.max_response_tokens + 1
    for path, teacher in _enumerated(job):
        if teacher.max_context_tokens is not None and teacher.max_context_tokens < needed:
            yield (
                f"{path}.maxContextTokens",
                f"data.maxPromptTokens + rollout.maxResponseTokens + 1 = {needed} tokens do not fit into "
                f"{teacher.max_context_tokens}. Write maxContextTokens: {needed}, or shorten one of the two.",
            )


@rule(12, "UnknownRoutingTarget", Level.ERROR, "routing names teachers that exist")
def unknown_routing_target(job: OPDJob) -> Hits:
    names = {teacher.name for teacher in job.spec.teachers}
    listed = ", ".join(sorted(names))
    for value, target in job.spec.routing.map.items():
        if target not in names:
            yield f"spec.routing.map.{value}", f"there is no teacher {target!r}. The teachers are {listed}."
    default = job.spec.routing.default
    if default is not None and default not in names:
        yield "spec.routing.default", f"there is no teacher {default!r}. The teachers are {listed}."


@rule(12, "RoutingMissing", Level.ERROR, "several teachers need a map or a default")
def routing_missing(job: OPDJob) -> Hits:
    routing = job.spec.routing
    several = len(job.spec.teachers) > 1 and routing.mode is RoutingMode.ROUTE
    if several and not routing.map and routing.default is None:
        yield (
            "spec.routing",
            "there are several teachers but nothing says who scores what. Write map: {<data source>: <teacher>}, or default: "
            f"{job.spec.teachers[0].name}, or mode: ensemble.",
        )


@rule(12, "TeacherNeverRouted", Level.WARNING, "every teacher is routed to")
def teacher_never_routed(job: OPDJob) -> Hits:
    routing = job.spec.routing
    routed = {*routing.map.values(), routing.default}
    if routing.mode is RoutingMode.ENSEMBLE or len(job.spec.teachers) == 1 or routed == {None}:
        return
    for path, teacher in _enumerated(job):
        if teacher.name not in routed:
            yield (
                path,
                f"no sample goes to {teacher.name}, but it holds accelerators. Add it to routing.map, or remove it.",
            )


@rule(12, "NotShuffled", Level.WARNING, "several teachers and data in the file's order")
def not_shuffled(job: OPDJob) -> Hits:
    if len(job.spec.teachers) > 1 and job.spec.routing.mode is RoutingMode.ROUTE and not job.spec.data.shuffle:
        yield (
            "spec.data.shuffle",
            "a file sorted by data source keeps one teacher busy and the others idle, and trains one after the other. Write "
            "shuffle: true.",
        )


@rule(13, "FullNeedsInprocess", Level.ERROR, "full needs teachers inside the learner")
def full_needs_inprocess(job: OPDJob) -> Hits:
    if job.spec.distillation.token_selection is not TokenSelection.FULL:
        return
    for path, teacher in _enumerated(job):
        if teacher.backend is not TeacherBackend.INPROCESS:
            yield (
                f"{path}.backend",
                f"no server sends its whole vocabulary, {teacher.backend} neither. Write backend: inprocess, or "
                "tokenSelection: teacher_topk with a topK.",
            )


@rule(13, "SglangWindowTooLarge", Level.ERROR, "the student's tokens fit into one request to SGLang")
def sglang_window_too_large(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if options.top_k is None or options.token_selection not in STUDENT_SETS:
        return
    if options.top_k * SGLANG_WINDOW <= SGLANG_MAX_IDS:
        return
    for _, teacher in _enumerated(job):
        if teacher.backend is TeacherBackend.SGLANG:
            yield (
                "spec.distillation.topK",
                f"SGLang takes the union of a window's ids, {options.top_k} x {SGLANG_WINDOW} > {SGLANG_MAX_IDS}. Write topK: "
                f"{SGLANG_MAX_IDS // SGLANG_WINDOW}, or backend: vllm for teacher {teacher.name}.",
            )


@rule(13, "InprocessWithServer", Level.ERROR, "an inprocess teacher has no servers")
def inprocess_with_server(job: OPDJob) -> Hits:
    for path, teacher in _enumerated(job):
        if teacher.backend is not TeacherBackend.INPROCESS:
            continue
        if teacher.external:
            yield (
                f"{path}.endpoints",
                "an inprocess teacher lives in the learner. Remove endpoints, or write the backend that the server speaks.",
            )
        if teacher.replicas > 1:
            yield f"{path}.replicas", "an inprocess teacher is sharded over the learner. Write replicas: 1."
        if teacher.tensor_parallel_size > 1:
            yield (
                f"{path}.tensorParallelSize",
                "an inprocess teacher is sharded over the learner. Write tensorParallelSize: 1.",
            )


@rule(16, "EnsembleTopk", Level.ERROR, "an ensemble has no best tokens in common")
def ensemble_topk(job: OPDJob) -> Hits:
    selection = job.spec.distillation.token_selection
    if job.spec.routing.mode is RoutingMode.ENSEMBLE and selection in TEACHER_SETS:
        yield (
            "spec.distillation.tokenSelection",
            f"{selection} needs the best tokens of one teacher, and those of an ensemble differ. Write tokenSelection: "
            "student_topk or student_sampled, or routing.mode: route.",
        )


@rule(16, "EnsembleMixedBackends", Level.ERROR, "an ensemble is served or in the learner, not both")
def ensemble_mixed_backends(job: OPDJob) -> Hits:
    if job.spec.routing.mode is not RoutingMode.ENSEMBLE:
        return
    inside = [path for path, teacher in _enumerated(job) if teacher.backend is TeacherBackend.INPROCESS]
    if inside and len(inside) < len(job.spec.teachers):
        yield (
            f"{inside[0]}.backend",
            "scores of servers and of teachers inside the learner are not mixed. Write backend: inprocess for all teachers, or for "
            "none.",
        )


@rule(19, "TeacherSource", Level.ERROR, "a teacher has a model or endpoints, never both")
def teacher_source(job: OPDJob) -> Hits:
    for path, teacher in _enumerated(job):
        if teacher.model is None and not teacher.external:
            yield (
                path,
                "the teacher has neither model (we serve it) nor endpoints (somebody else does). Write one of them.",
            )
        if teacher.model is not None and teacher.external:
            yield (
                f"{path}.model",
                "the teacher has both model and endpoints. Remove model (an external teacher may name its tokenizer), or "
                "endpoints.",
            )


@rule(19, "ApiKeyOfManagedTeacher", Level.ERROR, "managed teachers get a key of their own")
def api_key_of_managed_teacher(job: OPDJob) -> Hits:
    for path, teacher in _enumerated(job):
        if teacher.api_key_secret_ref is not None and not teacher.external:
            yield (
                f"{path}.apiKeySecretRef",
                "the operator makes the key of a teacher that it serves. Remove apiKeySecretRef.",
            )


@rule(19, "DuplicateTeacher", Level.ERROR, "teacher names are unique")
def duplicate_teacher(job: OPDJob) -> Hits:
    counts = Counter(teacher.name for teacher in job.spec.teachers)
    seen: set[str] = set()
    for path, teacher in _enumerated(job):
        if counts[teacher.name] > 1 and teacher.name in seen:
            yield f"{path}.name", f"there is another teacher {teacher.name!r}. Give each its own name."
        seen.add(teacher.name)


@rule(24, "NoAdapter", Level.ERROR, "some adapter can serve selection and backend")
def no_adapter(job: OPDJob) -> Hits:
    selection = job.spec.distillation.token_selection
    if selection is TokenSelection.FULL:  # rule 13 says it
        return
    for path, teacher in _enumerated(job):
        if selection in CAPABILITIES[teacher.backend]:
            continue
        able = [backend.value for backend, can in CAPABILITIES.items() if selection in can]
        yield (
            f"{path}.backend",
            f"{teacher.backend} cannot score {selection}: it takes no ids to score. Write tokenSelection: teacher_topk, or "
            f"backend: {' or '.join(able)}.",
        )


RULES = (
    top_k_over_backend_cap,
    external_top_k_cap,
    context_too_small,
    unknown_routing_target,
    routing_missing,
    teacher_never_routed,
    not_shuffled,
    full_needs_inprocess,
    sglang_window_too_large,
    inprocess_with_server,
    ensemble_topk,
    ensemble_mixed_backends,
    teacher_source,
    api_key_of_managed_teacher,
    duplicate_teacher,
    no_adapter,
)
