"""`kubectl auth can-i` for every verb on every resource that the API server knows: allowed is what is needed, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from operator_api import Api
from operator_player import Player

Manifest = dict[str, Any]
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
#: Beyond reading and writing: verbs by which rights grow.
GROWING = ("escalate", "bind", "impersonate", "approve", "sign", "use")
#: What Kubernetes allows everybody who logged in: to ask about himself.
EVERYBODY = {
    ("authorization.k8s.io", "selfsubjectaccessreviews", "create"),
    ("authorization.k8s.io", "selfsubjectrulesreviews", "create"),
    ("authentication.k8s.io", "selfsubjectreviews", "create"),
}
AT_ONCE = 16
Right = tuple[str, str, str]


@dataclass(frozen=True)
class Resource:
    """A resource or subresource of the API server."""

    group: str
    name: str
    namespaced: bool


@pytest.fixture
def resources(control_plane: Any) -> list[Resource]:
    """Every resource of every group, with subresources, from discovery."""
    groups = json.loads(control_plane.kubectl("get", "--raw", "/apis"))["groups"]
    paths = [("", "/api/v1")]
    paths += [(group["name"], f"/apis/{version['groupVersion']}") for group in groups for version in group["versions"]]
    found = {
        Resource(group, item["name"], item["namespaced"])
        for group, path in paths
        for item in json.loads(control_plane.kubectl("get", "--raw", path))["resources"]
    }
    # Asked for by OwnerReferencesPermissionEnforcement, and in no discovery.
    found |= {
        Resource(item.group, f"{item.name}/finalizers", item.namespaced) for item in found if "/" not in item.name
    }
    return sorted(found, key=lambda item: (item.group, item.name))


class Account:
    """Asks the API server what a service account may do."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self.user = f"system:serviceaccount:{namespace}:{name}"
        self._groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def may(self, verb: str, resource: Resource, namespace: str = "", name: str = "") -> bool:
        """`namespace` "" asks for all of them, or for a resource without one."""
        plain, _, subresource = resource.name.partition("/")
        attributes = {"group": resource.group, "resource": plain, "subresource": subresource, "verb": verb}
        attributes |= {"namespace": namespace, "name": name}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": self.user, "groups": self._groups, "resourceAttributes": attributes},
        }
        async with self._slots:
            answer = await self._api.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        assert "evaluationError" not in answer["status"], answer["status"]
        return bool(answer["status"]["allowed"])

    async def rights(self, resources: Iterable[Resource], namespace: str = "") -> set[Right]:
        """Everything that it may do in a namespace, or in the whole cluster."""
        asked = [(verb, item) for item in resources for verb in (*VERBS, *GROWING)]
        answers = await asyncio.gather(*(self.may(verb, item, namespace) for verb, item in asked))
        return {(item.group, item.name, verb) for (verb, item), yes in zip(asked, answers, strict=True) if yes}


def granted(manifests: list[Manifest]) -> set[Right]:
    """Rights of Roles, without those on single names."""
    return {
        (group, resource, verb)
        for manifest in manifests
        if manifest["kind"] == "Role"
        for rule in manifest["rules"]
        if "resourceNames" not in rule
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.timeout(600)
async def test_a_namespaced_install_can_do_its_work_and_nothing_else(
    operator_kubeconfig: Any,
    control_plane: Any,
    api: Api,
    namespace: str,
    make_namespace: Callable[[], str],
    rendered_rbac: Callable[[str], list[Manifest]],
    resources: list[Resource],
) -> None:
    """That it can do its work is shown by every other test of this folder, which all run with this account."""
    assert {("", "pods/exec"), ("", "secrets"), ("ray.io", "rayjobs")} <= {
        (item.group, item.name) for item in resources
    }
    account = Account(api, namespace, "opd-operator")
    inside = [item for item in resources if item.namespaced]
    assert await account.rights(inside, namespace) == granted(rendered_rbac(namespace))
    assert await account.rights(inside, make_namespace()) == set(), "another namespace"
    assert await account.rights(inside, "kube-system") == set(), "the system's namespace"
    assert await account.rights(resources) == EVERYBODY, "the whole cluster"
    lease = Resource("coordination.k8s.io", "leases", True)
    own = {verb for verb in VERBS if await account.may(verb, lease, namespace, "opd-operator")}
    foreign = {verb for verb in VERBS if await account.may(verb, lease, namespace, "somebody-elses")}
    # RBAC knows no name when something is created.
    assert (own, foreign) == ({"get", "update", "create"}, {"create"})
    said = control_plane.kubectl("-n", namespace, "auth", "can-i", "--list", f"--as={account.user}")
    assert "rayjobs.ray.io" in said
    assert "*.*" not in said


@pytest.mark.timeout(600)
async def test_the_ray_head_can_touch_its_progress_and_nothing_else(
    start_operator: Any, create_job: Any, player: Player, api: Api, namespace: str, resources: list[Resource]
) -> None:
    player.script.hold_at_step = 1
    await start_operator()
    job = await create_job()
    await job.reaches("Training")
    (head,) = await api.list("v1", "Pod", namespace, "opd.dev/role=head")
    account = Account(api, namespace, head["spec"]["serviceAccountName"])
    inside = [item for item in resources if item.namespaced]
    assert await account.rights(inside, namespace) == set()
    assert await account.rights(resources) == EVERYBODY
    config_maps = Resource("", "configmaps", True)
    own = {verb for verb in VERBS if await account.may(verb, config_maps, namespace, "math-progress")}
    assert own == {"get", "patch"}
