"""Every word that leaves the program: conditions, reasons, phases, events, labels, annotations, failure classes, ports.

docs/vocabulary.md is generated from this module, so each member carries its explanation.
"""

from __future__ import annotations

from enum import StrEnum


class Words(StrEnum):
    """A StrEnum whose members carry an explanation for the generated documentation."""

    explanation: str

    def __new__(cls, value: str, explanation: str = "") -> Words:
        member = str.__new__(cls, value)
        member._value_ = value
        member.explanation = explanation
        return member


class Phase(Words):
    PENDING = "Pending", "accepted, nothing started, or waiting in the queue for capacity"
    CHECKING = "Checking", "the input check runs; no accelerator is held"
    STARTING_TEACHERS = "StartingTeachers", "teacher servers load"
    PROBING_TEACHERS = "ProbingTeachers", "teachers are asked for real scores"
    STARTING_STUDENT = "StartingStudent", "the RayJob was created and its cluster starts"
    TRAINING = "Training", "the student is rolled out and trained"
    FINISHING = "Finishing", "the student is exported; teachers are gone"
    RETRYING = "Retrying", "waits for the back-off before the next attempt"
    SUSPENDING = "Suspending", "asked to stop; a checkpoint is being written"
    SUSPENDED = "Suspended", "no accelerator is held; suspend: false goes on"
    SUCCEEDED = "Succeeded", "the distilled student is there"
    FAILED = "Failed", "ended without success; the Failed condition says why"


TERMINAL_PHASES = frozenset({Phase.SUCCEEDED, Phase.FAILED})


class ConditionType(Words):
    ACCEPTED = "Accepted", "schema and rules pass"
    SUSPENDED = "Suspended", "no accelerator is held because spec.suspend is true"
    INPUTS_CHECKED = "InputsChecked", "models, data, tokenizers and storage were seen by a pod"
    TEACHERS_READY = "TeachersReady", "every replica of every teacher is ready"
    TEACHERS_PROBED = "TeachersProbed", "every teacher gave real, repeatable scores"
    RAY_JOB_CREATED = "RayJobCreated", "the RayJob of the current attempt exists"
    TRAINING_RUNNING = "TrainingRunning", "the trainer sends heartbeats"
    PROGRESSING = "Progressing", "the job moves; False names what it waits for"
    CHECKPOINT_AVAILABLE = "CheckpointAvailable", "a complete checkpoint exists"
    SUCCEEDED = "Succeeded", "the distilled student is there"
    FAILED = "Failed", "ended without success"
    RESOURCES_RELEASED = "ResourcesReleased", "no pod of the job holds an accelerator"
    NAME_COLLISION = "NameCollision", "an object with a child's name belongs to somebody else"


class FailureClass(Words):
    CONFIG = "Config", "the spec is wrong; no retry"
    DATA = "Data", "the data is wrong; no retry"
    TEACHER = "Teacher", "a teacher does not answer as it must; one restart"
    INFRASTRUCTURE = "Infrastructure", "node, pod or network; new attempt from the last checkpoint"
    CAPACITY = "Capacity", "no room yet; waits with a condition"
    INTERNAL = "Internal", "a fault of ours or unknown; one retry"
    DEADLINE = "Deadline", "a deadline of the spec passed"
    STALL = "Stall", "no activity for too long; one restart from the checkpoint"


class Outcome(Words):
    SUCCEEDED = "Succeeded", "finished"
    PREEMPTED = "Preempted", "stopped on request after saving"
    FAILED = "Failed", "failed with a class"


class ExitCode:
    """Exit codes of opd-trainer (sysexits where one fits)."""

    OK = 0
    CONFIG = 64
    DATA = 65
    TEACHER = 69
    INTERNAL = 70
    INFRASTRUCTURE = 75


EXIT_CODE_OF_CLASS = {
    FailureClass.CONFIG: ExitCode.CONFIG,
    FailureClass.DATA: ExitCode.DATA,
    FailureClass.TEACHER: ExitCode.TEACHER,
    FailureClass.INTERNAL: ExitCode.INTERNAL,
    FailureClass.STALL: ExitCode.INTERNAL,
    FailureClass.INFRASTRUCTURE: ExitCode.INFRASTRUCTURE,
}
CLASS_OF_EXIT_CODE = {
    ExitCode.CONFIG: FailureClass.CONFIG,
    ExitCode.DATA: FailureClass.DATA,
    ExitCode.TEACHER: FailureClass.TEACHER,
    ExitCode.INTERNAL: FailureClass.INTERNAL,
    ExitCode.INFRASTRUCTURE: FailureClass.INFRASTRUCTURE,
}


class Severity(Words):
    ERROR = "Error", "the job is refused"
    WARNING = "Warning", "the job runs; look at it"
    NOT_CHECKED = "NotChecked", "could not be read where the check runs"


class Reason(Words):
    """Reasons of conditions, attempts and events."""

    # waiting and moving
    RECEIVED = "Received", "the operator saw the object"
    ACCEPTED = "Accepted", "schema and rules pass"
    INVALID_SPEC = "InvalidSpec", "a rule is broken; the findings name field and remedy"
    WAITING = "Waiting", "an earlier step is not done"
    CHECK_RUNNING = "CheckRunning", "the check Job runs"
    CHECK_PASSED = "CheckPassed", "the check Job passed"
    CHECK_FAILED = "CheckFailed", "the check Job found an error"
    CHECK_DISABLED = "CheckDisabled", "preflight.enabled is false"
    TEACHERS_STARTING = "TeachersStarting", "replicas load"
    TEACHERS_READY = "TeachersReady", "every replica is ready"
    TEACHERS_LOST = "TeachersLost", "a ready teacher lost replicas"
    TEACHER_UNAVAILABLE = "TeacherUnavailable", "no replica of a teacher answers; samples are held"
    TEACHERS_RELEASED = "TeachersReleased", "teachers are not needed any more"
    TEACHER_NOT_READY = "TeacherNotReady", "a teacher did not become ready in time"
    TEACHER_RESTARTED = "TeacherRestarted", "a teacher was restarted once"
    PROBE_RUNNING = "ProbeRunning", "the probe Job runs"
    PROBE_PASSED = "ProbePassed", "the probe Job passed"
    PROBE_FAILED = "ProbeFailed", "the probe Job found an error"
    RAY_JOB_CREATED = "RayJobCreated", "the RayJob was created"
    RAY_CLUSTER_STARTING = "RayClusterStarting", "head and workers start"
    TRAINING_RUNNING = "TrainingRunning", "heartbeats arrive"
    EXPORTING = "Exporting", "the student is exported"
    CHECKPOINT_SAVED = "CheckpointSaved", "a complete checkpoint exists"
    SUSPEND_REQUESTED = "SuspendRequested", "spec.suspend is true"
    SUSPENDED = "Suspended", "everything is freed"
    RESUMED = "Resumed", "spec.suspend is false again"
    BACK_OFF = "BackOff", "waits before the next attempt"
    ATTEMPT_STARTED = "AttemptStarted", "a new attempt starts"
    ATTEMPT_FAILED = "AttemptFailed", "an attempt ended without success"
    PREEMPTED = "Preempted", "the trainer saved and stopped on request"
    SUCCEEDED = "Succeeded", "finished"
    RELEASED = "Released", "everything is freed"
    RELEASING = "Releasing", "pods are going away"
    HOLDING = "Holding", "pods of the job hold accelerators"
    KEPT_FOR_INSPECTION = "KeptForInspection", "cleanup.onFailure is KeepRay"
    CAPACITY_RELEASED = "CapacityReleased", "teachers were freed because the student has no room"
    NAME_COLLISION = "NameCollision", "an object with a child's name belongs to somebody else"
    WRITE_REFUSED = (
        "WriteRefused",
        "rights, admission policies or the form of an object keep the operator from writing it",
    )
    TYPE_NOT_READ = (
        "TypeNotRead",
        "the API server has not read the OPDJob type yet: its CRD was installed a moment ago; passes by itself",
    )
    STATUS_REFUSED = "StatusRefused", "the API server refuses the status or a part of it; the job goes on without"
    KUBERAY_MISSING = "KubeRayMissing", "the cluster does not serve ray.io/v1; install KubeRay 1.6 or newer"
    CHANGE_DEFERRED = "ChangeDeferred", "a change of the spec acts at the next attempt"
    # pods
    UNSCHEDULABLE = "Unschedulable", "no node has room; the message says what is missing"
    QUOTA_EXCEEDED = "QuotaExceeded", "a ResourceQuota refuses the pod"
    NOT_ADMITTED = "NotAdmitted", "a queue, for example Kueue, has suspended the RayJob until it has room"
    IMAGE_PULL_FAILED = "ImagePullFailed", "the image cannot be pulled"
    CONTAINER_CONFIG_ERROR = "ContainerConfigError", "a Secret, ConfigMap or setting of the container is missing"
    VOLUME_NOT_ATTACHED = "VolumeNotAttached", "a volume cannot be mounted"
    CRASH_LOOP = "CrashLoop", "the container ends again and again"
    OOM_KILLED = "OOMKilled", "the container used more memory than its limit"
    EVICTED = "Evicted", "the node evicted the pod"
    PREEMPTED_BY_SCHEDULER = "PreemptedByScheduler", "a pod of higher priority took the place"
    NODE_LOST = "NodeLost", "the node stopped answering"
    UNEXPECTED_ADMISSION = "UnexpectedAdmission", "the kubelet refused the pod"
    POD_DELETED = "PodDeleted", "the pod was deleted"
    POD_FAILED = "PodFailed", "the pod ended with an error"
    # student
    HEAD_LOST = "HeadLost", "the Ray head is gone"
    WORKER_LOST = "WorkerLost", "a Ray worker is gone"
    RAY_CLUSTER_NOT_READY = "RayClusterNotReady", "the Ray cluster lost its head for a minute"
    RAY_JOB_INVALID = "RayJobInvalid", "KubeRay refuses the RayJob"
    RAY_JOB_FAILED = "RayJobFailed", "the RayJob failed"
    RAY_JOB_STOPPED = "RayJobStopped", "the Ray job was stopped from outside"
    NO_FINAL_DOCUMENT = "NoFinalDocument", "the job ended without saying how"
    HEARTBEAT_TIMEOUT = "HeartbeatTimeout", "no heartbeat for heartbeatTimeoutSeconds"
    STALLED = "Stalled", "no activity for stallTimeoutSeconds"
    DEADLINE_EXCEEDED = "DeadlineExceeded", "activeDeadlineSeconds passed"
    PRE_RUNNING_DEADLINE_EXCEEDED = "PreRunningDeadlineExceeded", "preRunningDeadlineSeconds passed"
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded", "no retries are left"
    # trainer and checks
    CONFIG_ERROR = "ConfigError", "the configuration cannot run"
    DATA_ERROR = "DataError", "the data cannot be used"
    MODEL_NOT_FOUND = "ModelNotFound", "a model cannot be read"
    DATA_NOT_FOUND = "DataNotFound", "the data cannot be read"
    FIELD_NOT_FOUND = "FieldNotFound", "the data lacks a field"
    TOKENIZER_MISMATCH = "TokenizerMismatch", "student and teacher number their tokens differently"
    STORAGE_NOT_WRITABLE = "StorageNotWritable", "the claim cannot be written"
    STORAGE_FULL = "StorageFull", "no space for checkpoints"
    FAILED_FRACTION_EXCEEDED = "FailedFractionExceeded", "too many samples failed"
    TEACHER_ERROR = "TeacherError", "a teacher answers wrongly"
    TEACHER_UNREACHABLE = "TeacherUnreachable", "an endpoint does not answer"
    TEACHER_UNIFORM = "TeacherUniform", "a teacher gives every token the same probability"
    TEACHER_NOT_DETERMINISTIC = "TeacherNotDeterministic", "two scores of one sequence differ"
    TEACHER_TOPK_TOO_SMALL = "TeacherTopkTooSmall", "a teacher returns fewer than topK tokens"
    RESPONSE_CAP_SHORT = "ResponseCapShort", "responses are cut before the teacher's usual length"
    CONTEXT_TOO_SHORT = "ContextTooShort", "a teacher refuses a sequence of full length"
    ENGINE_FAILED = "EngineFailed", "a rollout engine cannot be kept running"
    LEARNER_FAILED = "LearnerFailed", "a learner process died"
    NOT_ENOUGH_MEMORY = "NotEnoughMemory", "parameters, gradients and optimizer state do not fit"
    SUPERSEDED = "Superseded", "a newer attempt owns the run directory"
    PLACEMENT_FAILED = "PlacementFailed", "Ray cannot place the actors"
    INTERNAL_ERROR = "InternalError", "a fault of ours"


class Label(Words):
    JOB = "opd.dev/job", "name of the OPDJob (hashed when long)"
    ROLE = "opd.dev/role", "role of the pod"
    ATTEMPT = "opd.dev/attempt", "attempt number"
    TEACHER = "opd.dev/teacher", "name of the teacher"
    NAME = "app.kubernetes.io/name", "always opd"
    INSTANCE = "app.kubernetes.io/instance", "name of the OPDJob"
    COMPONENT = "app.kubernetes.io/component", "role"
    MANAGED_BY = "app.kubernetes.io/managed-by", "always opd-operator"


class Role(Words):
    CHECK = "check", "input check"
    TEACHER = "teacher", "teacher server"
    PROBE = "probe", "teacher probe"
    HEAD = "head", "Ray head with the controller"
    WORKER = "worker", "Ray worker with learners and engines"
    CONFIG = "config", "configuration and progress"


class Annotation(Words):
    STOP = "opd.dev/stop", "on the progress ConfigMap: number of the attempt that shall save and stop"
    RESTART = "opd.dev/restart", "restart counter in a teacher's pod template"
    CONFIG_HASH = "opd.dev/config-hash", "hash of the trainer configuration"
    SPEC_HASH = "opd.dev/spec-hash", "hash of a child as it was created; a difference waits for the next attempt"


class Port:
    """Fixed ports of the pods."""

    TEACHER = 30000
    METRICS = 9400
    DRAIN = 9401
    RAY_DASHBOARD = 8265
    RAY_GCS = 6379
    RAY_CLIENT = 10001


class TrainerTask(Words):
    """What the training waits for, in the progress document and in the names of a step's seconds."""

    EVALUATE = "evaluate", "held-out prompts are answered and scored"
    ROLLOUT = "rollout", "the student answers prompts and the teachers score"
    TRAIN = "train", "the learner makes a step"
    PUBLISH = "publish", "new weights go to the engines"
    CHECKPOINT = "checkpoint", "a checkpoint is written"


class TrainerPhase(Words):
    """Phase in the progress document."""

    STARTING = "Starting", "models load, actors start"
    TRAINING = "Training", "steps are made"
    TEACHER_UNAVAILABLE = "TeacherUnavailable", "no replica of a teacher answers; samples are held"
    EXPORTING = "Exporting", "the student is exported; teachers are not needed any more"
    STOPPING = "Stopping", "a checkpoint is written before the stop"
    FINISHED = "Finished", "the final document is written"
