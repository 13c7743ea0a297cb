"""How each failure is brought about on a real cluster."""

from __future__ import annotations

from typing import Any

from operator_jobs import Job

from opd_failures.on_cluster import (
    PATIENCE,
    RARE,
    Act,
    Manifest,
    Place,
    Staged,
    claim_on_nothing,
    limited,
    merged,
    no_jobs_allowed,
    quota,
    refuses_jobs,
    somebody_elses_job,
    template,
    told,
    units,
)

SHORT_START = {"lifecycle": {"preRunningDeadlineSeconds": PATIENCE}}
SHORT_TEACHER = {"lifecycle": {"teacherReadyDeadlineSeconds": PATIENCE}}
#: Straight to the teachers: their failures need no check.
NO_CHECK: Manifest = {"preflight": {"enabled": False}}
HOLDS = told(run={"holds": True})
#: The pods that are asked to go do so when their grace is over: nobody saves.
HOLDS_ON = told(run={"holds": True}, drain={"lasts": True})


def _with(*sections: Manifest) -> Manifest:
    found: Manifest = {}
    for section in sections:
        found = merged(found, section)
    return found


# --- before anything, and the check ---


def _check(**does: Any) -> Manifest:
    return told(check=does)


def _real(**changes: Any) -> Staged:
    """The real check of the real trainer image finds it."""
    return Staged(job=changes, real=True)


ACCEPT = {
    "broken-rule": _real(distillation={"signal": "advantage"}),
    "write-over-quota": Staged(SHORT_START, before=quota(jobs="0"), alone=True),
    "write-forbidden": Staged(SHORT_START, before=no_jobs_allowed, prepared=refuses_jobs, alone=True),
    "name-collision": Staged(SHORT_START, before=somebody_elses_job),
    "child-invalid": Staged({"runtime": {"securityContext": {"runAsUser": -5}}}),
}
CHECK = {
    "model-missing": _real(student={"model": {"source": "/data/tiny/nobody"}}),
    "tokenizers-differ": _real(
        teachers=[{"name": "main", "backend": "transformers", "model": {"source": "/data/tiny/other", "dtype": "fp32"}}]
    ),
    "claim-not-writable": _real(
        runtime={"securityContext": {"runAsNonRoot": True, "runAsUser": 2000, "runAsGroup": 2000, "fsGroup": 2000}}
    ),
    "context-short": _real(rollout={"maxResponseTokens": 4000}),
    "check-config": _real(task={"reward": "no_such_module:score"}),
    "data-missing": _real(data={"source": "/data/tiny/nothing.jsonl"}),
    "field-missing": _real(data={"promptField": "question"}),
    "check-data": _real(data={"maxPromptTokens": 1}),
    "hub-away": _real(student={"model": {"source": "somebody/some-model"}}),
    "check-oom": Staged(_with(_check(eats=True), {"preflight": limited("48Mi")})),
    "check-crashes": Staged(_check(says="ImportError: no module named opd_trainer", exit=1)),
    "check-mute": Staged(_check(mute=True)),
    "check-no-node": Staged(_with(SHORT_START, {"preflight": {"resources": {"requests": {"cpu": "999"}}}})),
    "claim-missing": Staged(_with(SHORT_START, {"storage": {"claimName": "no-such-claim"}})),
    "claim-unmounted": Staged(
        _with(SHORT_START, {"storage": {"claimName": "nothing"}}), before=claim_on_nothing, alone=True
    ),
    "check-image-missing": Staged(
        _with(SHORT_START, {"runtime": {"image": "no/such-image:1", "imagePullPolicy": "Never"}})
    ),
    "check-too-long": Staged(_with(SHORT_START, _check(lasts=True))),
}


# --- teachers ---


def _teacher(*sections: Manifest, **fields: Any) -> Manifest:
    """A job that stops at its teacher; `fields` are the teacher's."""
    plain = {"name": "main", "backend": "transformers", "model": {"source": "/data/tiny/teacher", "dtype": "fp32"}}
    return _with(NO_CHECK, SHORT_TEACHER, *sections, {"teachers": [plain | fields]})


def _variable_from(**source: Any) -> Manifest:
    return template("teacher", env=[{"name": "X", "valueFrom": source}])


LAST_LINES = "loading weights\nthe weights are cursed\ngiving up: --speed is no argument"
TEACHERS = {
    "teacher-no-node": Staged(_teacher(**template("teacher", **units(99)))),
    "teacher-over-quota": Staged(_teacher(), before=quota(gpus="0"), alone=True),
    "teacher-image-missing": Staged(_teacher({"runtime": {"imagePullPolicy": "Never"}}, image="no/such-image:1")),
    "teacher-image-slow": Staged(_teacher(image="registry.example/no/such-image:1")),
    "teacher-secret-missing": Staged(_teacher(**_variable_from(secretKeyRef={"name": "nope", "key": "x"}))),
    "teacher-config-map-missing": Staged(_teacher(**_variable_from(configMapKeyRef={"name": "nope", "key": "x"}))),
    "teacher-volume-missing": Staged(
        _teacher(
            **template(
                "teacher",
                {"volumes": [{"name": "more", "secret": {"secretName": "nope"}}]},
                volumeMounts=[{"name": "more", "mountPath": "/more"}],
            )
        )
    ),
    "teacher-crashes": Staged(_teacher(told(serve={"says": LAST_LINES, "exit": 3}))),
    "teacher-oom": Staged(_teacher(told(serve={"eats": True}), **template("teacher", **limited("48Mi")))),
    "teacher-may-not-write": Staged(_teacher(told(serve={"writes": "/opt/cache"}))),
    "teacher-late": Staged(_teacher(told(serve={"lasts": True}))),
}


# --- the student ---


def _student(*sections: Manifest, act: Act | None = None, **how: Any) -> Staged:
    """One accelerator for the worker, which needs none: more jobs fail at the same time."""
    return Staged(_with(NO_CHECK, _worker(**template("ray-worker", **units(1))), *sections), act=act, **how)


def _worker(**fields: Any) -> Manifest:
    return {"ray": {"workers": fields}}


def _head(**fields: Any) -> Manifest:
    return {"ray": {"head": fields}}


WAITING_ROOM = {"initContainers": [{"name": "wait", "image": "opd-trainer:0.1.0", "command": ["sleep", "3600"]}]}
STUDENT = {
    "student-no-node": _student(
        {"lifecycle": {"teacherIdleTimeoutSeconds": 5}}, _worker(**template("ray-worker", **units(99)))
    ),
    "student-over-quota": _student({"lifecycle": {"teacherIdleTimeoutSeconds": 5}}, before=quota(gpus="1"), alone=True),
    "student-image-missing": _student(
        SHORT_START, _head(**template("ray-head", image="no/such-image:1", imagePullPolicy="Never"))
    ),
    "ray-job-refused": _student(_head(**template("ray-head", env=[{"name": "RAY_REDIS_ADDRESS", "value": "x:6379"}]))),
    "student-never-runs": _student(SHORT_START, _worker(**template("ray-worker", WAITING_ROOM))),
    "no-first-heartbeat": _student({"lifecycle": {"heartbeatTimeoutSeconds": 10}}, told(run={"mute": True})),
}


def _runs(role: str, program: str) -> Act:
    async def act(job: Job, place: Place) -> None:
        await place.run_in(job, role, program)

    return act


def _signals(role: str, program: str, signal: str) -> Act:
    """A signal to the processes of a pod whose command line holds these words."""
    own = "[ $id != $$ ] && tr '\\0' ' ' < /proc/$id/cmdline | grep -q"
    loop = (
        f"for id in $(ls /proc | grep -x '[0-9]*'); do {own} '[{program[0]}]{program[1:]}' && kill -{signal} $id; done"
    )
    return _runs(role, loop)


def _deletes(role: str) -> Act:
    async def act(job: Job, place: Place) -> None:
        await place.kubectl("delete", "pod", await place.pod(job, role), "--wait=false")

    return act


#: Memory that no process has for itself, so that the kernel's choice falls on the first process of the container.
EAT = "echo 1000 > /proc/1/oom_score_adj; exec dd if=/dev/zero of=/dev/shm/eaten bs=1M"


async def _evicts_worker(job: Job, place: Place) -> None:
    """What a drain does to a pod."""
    name = await place.pod(job, "worker")
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": place.namespace}}
    await job.api.post(f"/api/v1/namespaces/{place.namespace}/pods/{name}/eviction", body)


async def _a_greater_one_comes(job: Job, place: Place) -> None:
    """A pod of higher priority needs the one accelerator that the worker has."""
    container = {"name": "x", "image": "opd-trainer:0.1.0", "command": ["sleep", "3600"], **units(1, RARE)}
    spec = {
        "priorityClassName": "greater",
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "greater"}}
    await place.apply(
        priority | {"value": 1000}, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "greater"}, "spec": spec}
    )


async def _deletes_ray_job(job: Job, place: Place) -> None:
    (ray_job,) = await job.children("ray.io/v1", "RayJob")
    await place.kubectl("delete", "rayjob", ray_job["metadata"]["name"], "--wait=false")


async def _time_is_up(job: Job, place: Place) -> None:
    await job.patch({"lifecycle": {"activeDeadlineSeconds": 1}})


#: The dashboard's own words for "stop".
STOP_JOB = """exec python -c '
import json, urllib.request as r
jobs = json.load(r.urlopen("http://127.0.0.1:8265/api/jobs/"))
for job in jobs:
    r.urlopen(r.Request("http://127.0.0.1:8265/api/jobs/" + job["submission_id"] + "/stop", method="POST"))
'"""
GRACELESS = {"lifecycle": {"preemptionGraceSeconds": 3}}
FIXED = {"nodeName": "gpu-0"}
CLUSTER = {
    "head-crashes": _student(HOLDS, act=_signals("head", "gcs_server", "KILL")),
    "worker-crashes": _student(HOLDS, act=_signals("worker", "raylet/raylet", "KILL")),
    "head-oom": _student(HOLDS, _head(**limited("1500Mi", asked="1300Mi")), act=_runs("head", EAT)),
    "worker-oom": _student(HOLDS, _worker(**limited("1200Mi", asked="1000Mi")), act=_runs("worker", EAT)),
    "head-not-admitted": _student(HOLDS, _head(nodeSelector={"there": "is-none"}, **template("ray-head", FIXED))),
    "head-no-device": _student(HOLDS, _head(**template("ray-head", FIXED, **units(99)))),
    "head-deleted": _student(HOLDS_ON, act=_deletes("head")),
    "worker-deleted": _student(HOLDS_ON, act=_deletes("worker")),
    "drained": _student(HOLDS_ON, act=_evicts_worker),
    "scheduler-preempts": _student(
        HOLDS_ON, _worker(**template("ray-worker", **units(1, RARE))), act=_a_greater_one_comes
    ),
    # The probe asks the agent. A raylet that is stopped would be taken for a dead node after 30 s, before the minute is over.
    "head-not-ready": _student(HOLDS, act=_signals("head", "ray::DashboardAgent", "STOP")),
    "heartbeats-stop": _student({"lifecycle": {"heartbeatTimeoutSeconds": 10}}, HOLDS, act=_runs("head", "touch /tmp/mute")),
    "ray-job-deleted": _student(HOLDS, act=_deletes_ray_job),
    "preempted": _student(HOLDS, act=_runs("head", "touch /tmp/preempt")),
    "too-long": _student(HOLDS, act=_time_is_up),
}  # fmt: skip


def _exits(code: int) -> Staged:
    return _student(told(run={"says": "these were my last words", "exit": code}))


CHECKPOINT = {"step": 2, "path": "/data/opd/checkpoints/step-2.a1"}
KUBERAY = {
    "ray-stopped": _student(HOLDS, act=_runs("head", STOP_JOB)),
    "killed": _student(HOLDS, act=_runs("head", "kill -9 $(cat /tmp/stand-in.pid)")),
    "success-mute": _student(told(run={"exit": 0})),
    "success-empty": _student(told(run={"document": {"outcome": "Succeeded"}})),
    "success-denied": _student(told(run={"document": {"outcome": "Succeeded", "checkpoint": CHECKPOINT}, "exit": 1})),
    **{f"exit-{code}": _exits(code) for code in (64, 65, 69, 70, 75, 1)},
}
TRAINER = {
    "stall-seen": _student({"lifecycle": {"stallTimeoutSeconds": 8}}, HOLDS, act=_runs("head", "touch /tmp/idle")),
}
#: By the groups of the table.
ON_CLUSTER: dict[str, dict[str, Staged]] = {
    "accept": ACCEPT,
    "check": CHECK,
    "teachers": TEACHERS,
    "student": STUDENT,
    "cluster": CLUSTER,
    "kuberay": KUBERAY,
    "trainer": TRAINER,
}
