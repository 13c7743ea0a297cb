"""install, upgrade and uninstall by the real Helm on a real API server. Pods do not run here: tests/e2e has those."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operator_api import Api
from operator_jobs import Job, document

from opd_cluster import parts

CHART = Path(__file__).resolve().parents[3] / "charts" / "opd-operator"


class Release:
    """One Helm release in a namespace of its own."""

    def __init__(self, control_plane: Any, namespace: str) -> None:
        self.control_plane = control_plane
        self.name = f"opd-{namespace}"
        self.namespace = namespace

    def helm(self, *arguments: str | Path) -> str:
        command = [parts.binary(parts.HELM), "--kubeconfig", self.control_plane.kubeconfig, "-n", self.namespace]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, verb: str, *arguments: str) -> str:
        return self.helm(verb, self.name, CHART, "--wait=hookOnly", *arguments)

    def get(self, *arguments: str) -> str:
        return str(self.control_plane.kubectl("-n", self.namespace, "get", *arguments))


@pytest.fixture
def release(control_plane: Any, namespace: str) -> Iterator[Release]:
    made = Release(control_plane, namespace)
    yield made
    made.helm("uninstall", made.name, "--ignore-not-found")


async def test_jobs_and_their_kind_survive_the_chart(release: Release, api: Api, namespace: str) -> None:
    # The CRD of this session was applied by kubectl, as a user may have done before: Helm takes it over when told to.
    notes = release.apply("install", "--take-ownership")
    assert "kubectl get opd -w" in notes
    assert "KubeRay is missing" not in notes, "this cluster serves ray.io/v1"
    await api.create(document(namespace))
    job = Job(api, namespace, "math")
    before = await job.manifest()
    release.apply("upgrade", "--set", "replicas=2", "--set", f"watchNamespaces={{{namespace}}}")
    assert release.get("deployment", "-o", "jsonpath={.items[*].spec.replicas}") == "2"
    assert "RoleBinding" in release.get("rolebindings", "-o", "yaml")
    account = f"--as=system:serviceaccount:{namespace}:{release.name}-opd-operator"
    can = release.control_plane.kubectl("-n", namespace, "auth", "can-i", "create", "rayjobs.ray.io", account)
    assert can.strip() == "yes"
    release.helm("uninstall", release.name)
    after = await job.manifest()
    assert before is not None
    assert after is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert not after["metadata"].get("deletionTimestamp")
    assert not after["metadata"].get("finalizers")
    assert release.get("deployments,roles,rolebindings,serviceaccounts", "-o", "name").split() == [
        "serviceaccount/default"
    ]
    crd = release.control_plane.kubectl("get", "crd", "opdjobs.opd.dev", "-o", "jsonpath={.metadata.deletionTimestamp}")
    assert crd == ""
    release.apply("install")
