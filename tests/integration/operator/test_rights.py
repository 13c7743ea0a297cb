"""The chart grants exactly the verbs that the operator uses. The other tests here prove that they suffice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml
from operator_api import Api
from operator_jobs import Job, document, eventually
from operator_player import Player

Manifest = dict[str, Any]
Right = tuple[str, str]
#: Granted without being called by the operator itself, each for a reason.
NEEDED_UNCALLED = {
    # OwnerReferencesPermissionEnforcement asks for it before an owner reference may block deletion.
    ("update", "opdjobs/finalizers"),
    # Asked for when a server-side apply, a patch, makes an object.
    ("create", "deployments"),
    ("create", "services"),
    ("create", "networkpolicies"),
}


def granted(manifests: list[Manifest]) -> set[Right]:
    return {
        (verb, resource)
        for manifest in manifests
        if manifest["kind"] == "Role"
        for rule in manifest["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


async def test_the_verbs_in_the_chart_are_the_verbs_used(
    start_operator: Any,
    create_job: Any,
    player: Player,
    api: Api,
    namespace: str,
    rendered_rbac: Callable[[str], list[Manifest]],
) -> None:
    """One operator sees every path that reads or writes: success, suspension, a lost head, a TTL, objects in the way."""
    operator = await start_operator()
    blocked = [await _blocked(api, create_job, namespace, manifest) for manifest in in_the_way()]
    player.script.hold_at_step = 2
    job = await create_job("math", lifecycle={"preemptionGraceSeconds": 5})
    await job.reaches("Training")
    for _ in range(2):
        await job.patch({"suspend": True})
        await job.reaches("Suspended")
        await job.patch({"suspend": False})
        await job.reaches("Training")
    await job.patch({"suspend": True})
    await job.reaches("Suspended")
    player.script.hold_at_step = None
    await job.patch({"suspend": False})
    await job.reaches("Succeeded", seconds=60)
    short = await create_job("short", lifecycle={"ttlSecondsAfterFinished": 1, "preemptionGraceSeconds": 5})

    async def is_gone() -> bool:
        return await short.manifest() is None

    await eventually("the TTL deleted the job", is_gone, seconds=60, state=short.status)
    for held in blocked:

        async def collides(held: Any = held) -> bool:
            return (await held.condition("NameCollision")).get("status") == "True"

        await eventually(f"NameCollision of {held.name}", collides, state=held.status)
    used = set(await operator.calls())
    rights = granted(rendered_rbac(namespace))
    assert used - rights == set(), "used, but not granted"
    assert rights - used - NEEDED_UNCALLED == set(), "granted, but not used"


def in_the_way() -> list[Manifest]:
    """Foreign objects with the names of children: `<job>-...`."""
    pod = {"containers": [{"name": "c", "image": "i"}]}
    template = {"spec": {**pod, "restartPolicy": "Never"}}
    head = {"rayStartParams": {}, "template": {"spec": pod}}
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "a-check-inputs"},
            "spec": {"template": template},
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "b-progress"}},
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": "c-1"},
            "spec": {"entrypoint": "x", "suspend": True, "rayClusterSpec": {"headGroupSpec": head}},
        },
    ]


async def _blocked(api: Api, create_job: Any, namespace: str, foreign: Manifest) -> Any:
    name = foreign["metadata"]["name"]
    await api.create({**foreign, "metadata": {"name": name, "namespace": namespace}})
    return await create_job(name[0])


async def test_one_operator_serves_every_namespace_with_the_cluster_role(
    control_plane: Any, start_operator: Any, make_namespace: Any, api: Api, namespace: str, rendered_rbac: Any
) -> None:
    """The rules are the same (tests/unit/chart); here they are bound in the whole cluster, and watches are cluster-wide."""
    (rules,) = [
        m["rules"] for m in rendered_rbac(namespace) if m["metadata"]["name"] == "opd-operator" and "rules" in m
    ]
    name = f"everywhere-{namespace}"
    subject = {"kind": "ServiceAccount", "name": "opd-operator", "namespace": namespace}
    role_ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    head = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": name}}
    everywhere = [
        {**head, "kind": "ClusterRole", "rules": rules},
        {**head, "kind": "ClusterRoleBinding", "roleRef": role_ref, "subjects": [subject]},
    ]
    control_plane.kubectl("apply", "-f", "-", input_text=yaml.safe_dump_all(everywhere))
    try:
        operator = await start_operator(watch_namespaces="")
        jobs = [Job(api, space, "math") for space in (make_namespace(), make_namespace())]
        for job in jobs:
            await api.create(document(job.namespace))
        for job in jobs:
            await job.reaches("Checking")
        ages = await operator.metric("opd_operator_watch_age_seconds", kind="opdjobs")
        assert ages < 90
        assert (await operator.get("/healthz"))[0] == 200
    finally:
        control_plane.kubectl("delete", "clusterrole,clusterrolebinding", name)
