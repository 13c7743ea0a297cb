"""Rule 28: arguments of a teacher's server that are the operator's own. The last of two equal flags wins, silently."""

from __future__ import annotations

from opd_api.rules.finding import Hits, Level, rule
from opd_api.v1alpha1 import OPDJob, TeacherBackend

_ADDRESS = "probes, the Service and the trainer expect the address that the operator sets"
_MODEL = "write model.source"
_REVISION = "write model.revision"
_DTYPE = "write model.dtype"
_PARALLEL = "write tensorParallelSize"
_CONTEXT = "write maxContextTokens"
_TRUST = "write model.trustRemoteCode: true"
_CACHE = "write prefixCaching"
_DEVICE = "write runtime.device"
_KEYS = "the operator makes the keys and hands them over unseen"
_NAME = "the trainer asks for the name that the operator sets"
_TLS = "probes and the trainer speak plain HTTP inside the job's own NetworkPolicy"
_RAW = "scores must be the model's own log-probabilities"

#: Flags that the operator sets or relies on, and what to do instead.
OWNED: dict[TeacherBackend, dict[str, str]] = {
    TeacherBackend.SGLANG: {
        "--model-path": _MODEL,
        "--served-model-name": _NAME,
        "--revision": _REVISION,
        "--host": _ADDRESS,
        "--port": _ADDRESS,
        "--tp-size": _PARALLEL,
        "--tensor-parallel-size": _PARALLEL,
        "--dtype": _DTYPE,
        "--context-length": _CONTEXT,
        "--trust-remote-code": _TRUST,
        "--disable-radix-cache": _CACHE,
        "--device": _DEVICE,
        "--config": _KEYS,
        "--api-key": _KEYS,
        "--admin-api-key": _KEYS,
        "--ssl-keyfile": _TLS,
        "--ssl-certfile": _TLS,
    },
    TeacherBackend.VLLM: {
        "--model": _MODEL,
        "--served-model-name": _NAME,
        "--revision": _REVISION,
        "--host": _ADDRESS,
        "--port": _ADDRESS,
        "--uds": _ADDRESS,
        "--tensor-parallel-size": _PARALLEL,
        "-tp": _PARALLEL,
        "--dtype": _DTYPE,
        "--max-model-len": _CONTEXT,
        "--trust-remote-code": _TRUST,
        "--enable-prefix-caching": _CACHE,
        "--no-enable-prefix-caching": _CACHE,
        "--logprobs-mode": _RAW,
        "--api-key": _KEYS,
        "--ssl-keyfile": _TLS,
        "--ssl-certfile": _TLS,
    },
    TeacherBackend.LMDEPLOY: {
        "--model-name": _NAME,
        "--revision": _REVISION,
        "--server-name": _ADDRESS,
        "--server-port": _ADDRESS,
        "--backend": "only this engine returns log-probabilities of the input",
        "--logprobs-mode": _RAW,
        "--tp": _PARALLEL,
        "--dtype": _DTYPE,
        "--session-len": _CONTEXT,
        "--trust-remote-code": _TRUST,
        "--enable-prefix-caching": _CACHE,
        "--api-keys": _KEYS,
        "--ssl": _TLS,
    },
    TeacherBackend.TRANSFORMERS: {
        "--model": _MODEL,
        "--served-model-name": _NAME,
        "--revision": _REVISION,
        "--host": _ADDRESS,
        "--port": _ADDRESS,
        "--dtype": _DTYPE,
        "--device": _DEVICE,
        "--max-context-tokens": _CONTEXT,
        "--trust-remote-code": _TRUST,
    },
    TeacherBackend.INPROCESS: {},
}
#: The fewest letters of a flag that argparse completes and a person would write.
_SHORTEST = len("--tp")


def owned_flag(backend: TeacherBackend, argument: str) -> str | None:
    """The operator's own flag that an argument sets: itself, with `=value`, with underscores, or cut short as argparse allows."""
    name = argument.partition("=")[0].replace("_", "-")
    own = OWNED[backend]
    if name in own or len(name) < _SHORTEST or not name.startswith("--"):
        return name if name in own else None
    return next((flag for flag in own if flag.startswith(name)), None)


@rule(28, "OwnedArgument", Level.ERROR, "arguments of a teacher leave alone what the operator sets")
def owned_argument(job: OPDJob) -> Hits:
    for index, teacher in enumerate(job.spec.teachers):
        if teacher.external:
            continue
        for number, argument in enumerate(teacher.args):
            flag = owned_flag(teacher.backend, argument)
            if flag is not None:
                yield (
                    f"spec.teachers[{index}].args[{number}]",
                    f"{argument.partition('=')[0]} is the operator's own flag ({flag}), and a second one would win over it. Remove "
                    f"it: {OWNED[teacher.backend][flag]}.",
                )
        if teacher.args and not teacher.args[0].startswith("-"):
            yield (
                f"spec.teachers[{index}].args[0]",
                f"{teacher.args[0][:60]!r} is no flag, and the server takes no other model. Write the flag before it, or remove it.",
            )


RULES = (owned_argument,)
