"""A status that the API server refuses, whole or in part, stops no clock, no training and no cleanup."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from operator_jobs import eventually

Manifest = dict[str, Any]
#: etcd takes 1.5 MiB in one request.
TEMPLATE_BYTES, VARIABLE_BYTES, VARIABLES = 1_200_000, 4_000, 60
Refuse = Callable[[str], None]


@pytest.fixture
def refuse(control_plane: Any, namespace: str) -> Iterator[Refuse]:
    """Makes admission refuse status writes in the test's namespace for which a CEL expression is false."""
    name = f"status-{namespace}"
    resources = [
        {
            "apiGroups": ["opd.dev"],
            "apiVersions": ["*"],
            "operations": ["UPDATE"],
            "resources": ["opdjobs/status"],
        }
    ]
    head = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    own = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}

    def make(expression: str) -> None:
        validations = [{"expression": expression, "message": "no such status here", "reason": "Invalid"}]
        policy = {"matchConstraints": {"resourceRules": resources}, "validations": validations}
        binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": own}
        for kind, spec in (("ValidatingAdmissionPolicy", policy), ("ValidatingAdmissionPolicyBinding", binding)):
            control_plane.kubectl("apply", "-f", "-", input_text=json.dumps({**head, "kind": kind, "spec": spec}))

    yield make
    control_plane.kubectl("delete", "validatingadmissionpolicy,validatingadmissionpolicybinding", name)


async def is_refused(control_plane: Any, job: Any) -> bool:
    """Whether the policy acts already: a server reads new ones after some seconds."""
    patch = json.dumps({"status": {"training": {"activity": "asked by the test"}}})
    try:
        control_plane.kubectl(
            *("-n", job.namespace, "patch", "opdjob", job.name, "--subresource=status", "--type=merge"),
            *("--dry-run=server", "-p", patch),
        )
    except Exception as refusal:
        return "no such status here" in str(refusal)
    return False


async def test_deadlines_and_cleanup_go_on_when_no_status_can_be_written(
    control_plane: Any, start_operator: Any, create_job: Any, player: Any, refuse: Refuse
) -> None:
    player.script.teachers_ready = False
    refuse("false")
    job = await create_job(lifecycle={"activeDeadlineSeconds": 12})
    await eventually("the policy acts", lambda: is_refused(control_plane, job))
    operator = await start_operator()

    async def teacher() -> bool:
        return bool(await job.names("apps/v1", "Deployment"))

    async def no_teacher() -> bool:
        return not await teacher()

    await eventually("the teacher starts", teacher, state=job.status)
    await eventually("the teacher goes at the deadline", no_teacher, state=job.status)
    assert await job.status() == {}
    assert "StatusRefused" in await job.reasons()
    assert not [line for line in operator.logs() if line["message"] == "pass failed"]


async def test_a_status_is_written_without_the_part_that_is_refused(
    control_plane: Any, start_operator: Any, create_job: Any, player: Any, refuse: Refuse
) -> None:
    refuse("!has(object.status.training)")
    job = await create_job()
    await eventually("the policy acts", lambda: is_refused(control_plane, job))
    await start_operator()
    await job.reaches("Succeeded", seconds=60)
    status = await job.status()
    assert "training" not in status
    assert status["attempts"][0]["endTime"]
    assert "no such status here" in (await job.condition("Progressing"))["message"]
    assert "StatusRefused" in await job.reasons()


async def test_an_object_that_etcd_finds_too_large_ends_the_job_and_holds_no_teacher(
    start_operator: Any, create_job: Any, player: Any
) -> None:
    """The student's RayJob holds the template too, and the variables of all pods twice. A dry run does not reach etcd."""
    container = {"name": "ray-head", "args": ["x" * TEMPLATE_BYTES]}
    env = [{"name": f"V{number}", "value": "x" * VARIABLE_BYTES} for number in range(VARIABLES)]
    job = await create_job(runtime={"env": env}, ray={"head": {"template": {"spec": {"containers": [container]}}}})
    operator = await start_operator()
    await job.reaches("Failed", seconds=90)
    failed = await job.condition("Failed")
    assert failed["reason"] == "InvalidSpec"
    assert "too large" in failed["message"] or "larger than max" in failed["message"]
    assert "RayJob math-1" in failed["message"]

    async def no_teacher() -> bool:
        return not await job.names("apps/v1", "Deployment")

    await eventually("the teacher is freed", no_teacher, state=job.status)
    assert not [line for line in operator.logs() if line["message"] == "pass failed"]
