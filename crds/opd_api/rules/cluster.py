"""Rules 18, 20 to 23 and 27: steps, names, storage, accelerators, suspension and secrets."""

from __future__ import annotations

import re

from opd_api.rules.finding import Hits, Level, rule
from opd_api.v1alpha1 import Device, OPDJob, WeightSync

NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_LIMIT = 40
#: Volumes that the operator gives its pods besides the claim, and where they are mounted.
OWN_VOLUMES = {
    "home": "/home/opd",
    "tmp": "/tmp",  # noqa: S108 - an emptyDir of the pod's own
    "dshm": "/dev/shm",  # noqa: S108
    "config": "/etc/opd",
    "keys": "/run/opd",
}
#: Names of variables that hold something to be kept secret.
SECRETIVE = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY)(_|$)", re.I)

#: Arguments of a server that are followed by a secret.
SECRET_FLAG = re.compile(r"--([a-z]+[-_])*(api[-_]?keys?|password|secret|hf[-_]token|auth[-_]token)(=|$)", re.I)


@rule(18, "StepsXorEpochs", Level.ERROR, "exactly one of steps and epochs")
def steps_xor_epochs(job: OPDJob) -> Hits:
    training = job.spec.training
    if training.steps is not None and training.epochs is not None:
        yield "spec.training.epochs", "steps and epochs are both written. Keep one of them."
    if training.steps is None and training.epochs is None:
        yield "spec.training.steps", "neither steps nor epochs is written. Write steps: 200 or epochs: 1."


@rule(18, "PartialNeedsStaleness", Level.ERROR, "partialRollout needs maxStaleness > 0")
def partial_needs_staleness(job: OPDJob) -> Hits:
    rollout = job.spec.rollout
    if rollout.partial_rollout and rollout.max_staleness == 0:
        yield (
            "spec.rollout.partialRollout",
            "a response that goes on under new weights has tokens of old ones, which maxStaleness 0 forbids. Write "
            "maxStaleness: 1, or partialRollout: false.",
        )


@rule(18, "HalfIdle", Level.WARNING, "synchronous training leaves half of the accelerators idle")
def half_idle(job: OPDJob) -> Hits:
    spec = job.spec
    if spec.runtime.device is Device.CPU:  # its units are placeholders that cost nothing
        return
    if spec.rollout.max_staleness == 0 and spec.runtime.effective_accelerator_resource is not None and spec.demand > 1:
        yield (
            "spec.rollout.maxStaleness",
            f"engines and learners take turns on {spec.demand} accelerators, so about half of them wait. Write maxStaleness: 1 "
            "to let rollouts run one step ahead.",
        )


@rule(20, "JobName", Level.ERROR, "the job's name fits into the names of its children")
def job_name(job: OPDJob) -> Hits:
    name = job.metadata.name
    if re.fullmatch(NAME_PATTERN, name) is None or len(name) > NAME_LIMIT:
        yield (
            "metadata.name",
            f"{name!r} cannot be the name of a job: at most {NAME_LIMIT} lower-case letters, digits and '-', a letter first and "
            "no '-' last.",
        )


@rule(21, "ClaimMissing", Level.ERROR, "storage names a claim", cluster_only=True)
def claim_missing(job: OPDJob) -> Hits:
    if job.spec.storage.claim_name is None:
        yield (
            "spec.storage.claimName",
            "checkpoints and the student need a place that outlives pods. Write claimName: <a ReadWriteMany "
            "PersistentVolumeClaim of this namespace>.",
        )


@rule(21, "StoragePath", Level.ERROR, "runs are written below the mount point of the claim")
def storage_path(job: OPDJob) -> Hits:
    storage = job.spec.storage
    mounts = [("spec.storage.mountPath", storage.mount_path)]
    mounts += [
        (f"spec.storage.extraVolumes[{index}].mountPath", volume.mount_path)
        for index, volume in enumerate(storage.extra_volumes)
    ]
    for path, value in mounts:
        if not value.startswith("/") or not value.strip("/") or ".." in value.split("/") or ":" in value:
            yield (
                path,
                f"{value!r} is no place for a volume. Write an absolute path without '..' and ':', such as /data.",
            )
    run_path = storage.run_path
    if run_path.startswith("/") or not run_path.strip() or ".." in run_path.split("/"):
        yield (
            "spec.storage.runPath",
            f"{run_path!r} does not lie below mountPath, so checkpoints would end with their pod. Write a relative path "
            "without '..', such as opd.",
        )


@rule(21, "VolumeCollides", Level.ERROR, "every volume has its own name and its own place")
def volume_collides(job: OPDJob) -> Hits:
    storage = job.spec.storage
    names, places = {"data", *OWN_VOLUMES}, set(OWN_VOLUMES.values())
    if storage.mount_path.rstrip("/") in places:
        yield "spec.storage.mountPath", f"the pods mount a volume of their own at {storage.mount_path}. Write /data."
    places.add(storage.mount_path.rstrip("/"))
    for index, volume in enumerate(storage.extra_volumes):
        path = f"spec.storage.extraVolumes[{index}]"
        if volume.name in names:
            yield f"{path}.name", f"there is another volume {volume.name!r} in the pods. Give this one another name."
        if volume.mount_path.rstrip("/") in places:
            yield f"{path}.mountPath", f"another volume is mounted at {volume.mount_path}. Write another path."
        names.add(volume.name)
        places.add(volume.mount_path.rstrip("/"))


@rule(22, "CpuTensorParallel", Level.ERROR, "no tensor parallelism on CPUs")
def cpu_tensor_parallel(job: OPDJob) -> Hits:
    spec = job.spec
    if spec.runtime.device is not Device.CPU:
        return
    places = [("spec.rollout", spec.rollout.tensor_parallel_size)]
    places += [
        (f"spec.teachers[{index}]", teacher.tensor_parallel_size)
        for index, teacher in enumerate(spec.teachers)
        if not teacher.external
    ]
    for path, size in places:
        if size > 1:
            yield (
                f"{path}.tensorParallelSize",
                "device: cpu cannot split a model over accelerators. Write tensorParallelSize: 1, or device: cuda.",
            )


@rule(22, "CpuNccl", Level.ERROR, "no NCCL on CPUs")
def cpu_nccl(job: OPDJob) -> Hits:
    if job.spec.runtime.device is Device.CPU and job.spec.training.weight_sync is WeightSync.NCCL:
        yield "spec.training.weightSync", "NCCL needs GPUs. Write weightSync: disk, or device: cuda."


@rule(22, "EngineOverWorker", Level.ERROR, "an engine fits into one Ray worker")
def engine_over_worker(job: OPDJob) -> Hits:
    size, room = job.spec.rollout.tensor_parallel_size, job.spec.gpus_per_worker
    if size > room:
        yield (
            "spec.ray.workers.gpusPerWorker",  # the one of the two that may be put right while the job runs
            f"an engine of {size} accelerators does not fit into a worker with {room}. Write ray.workers.gpusPerWorker: {size}, "
            f"or tensorParallelSize: {room}.",
        )


@rule(23, "SuspendLosesWork", Level.WARNING, "suspending saves first, if there is time")
def suspend_loses_work(job: OPDJob) -> Hits:
    if job.spec.suspend:
        yield (
            "spec.suspend",
            "the trainer is asked to save first; work since the last checkpoint is lost when it does not answer within "
            f"lifecycle.preemptionGraceSeconds ({job.spec.lifecycle.preemption_grace_seconds} s).",
        )


@rule(27, "SecretInLiteral", Level.WARNING, "secrets come from Secrets, not from literals")
def secret_in_literal(job: OPDJob) -> Hits:
    remedy = "is readable by everybody who may read the job. Write valueFrom: {secretKeyRef: {name: …, key: …}}"
    for index, variable in enumerate(job.spec.runtime.env):
        if variable.value and SECRETIVE.search(variable.name):
            yield f"spec.runtime.env[{index}].value", f"{variable.name} {remedy} instead of value."
    for index, teacher in enumerate(job.spec.teachers):
        for number, argument in enumerate(teacher.args):
            if SECRET_FLAG.match(argument):
                path = f"spec.teachers[{index}].args[{number}]"
                yield (
                    path,
                    f"what {argument.partition('=')[0]} is given {remedy} in runtime.env, or leave it to the operator.",
                )
        for number, endpoint in enumerate(teacher.endpoints):
            if "@" in endpoint.split("/")[2]:
                path = f"spec.teachers[{index}].endpoints[{number}]"
                yield path, "a password in a URL is readable by everybody who may read the job. Write apiKeySecretRef."
    variables = (job.spec.ray.runtime_env or {}).get("env_vars")
    for name in variables if isinstance(variables, dict) else ():
        if SECRETIVE.search(name):
            yield "spec.ray.runtimeEnv", f"{name} {remedy} in runtime.env instead; Ray shows its runtime environment."


@rule(27, "RuntimeEnvVariables", Level.ERROR, "Ray's env_vars is a mapping from names to texts")
def runtime_env_variables(job: OPDJob) -> Hits:
    variables = (job.spec.ray.runtime_env or {}).get("env_vars", {})
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        yield "spec.ray.runtimeEnv", 'env_vars is no mapping from names to texts. Write env_vars: {NAME: "text"}.'


RULES = (
    steps_xor_epochs,
    partial_needs_staleness,
    half_idle,
    job_name,
    claim_missing,
    storage_path,
    volume_collides,
    cpu_tensor_parallel,
    cpu_nccl,
    engine_over_worker,
    suspend_loses_work,
    secret_in_literal,
    runtime_env_variables,
)
