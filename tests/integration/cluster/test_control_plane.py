"""The control plane of the integration tier is a real one, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from opd_cluster import cgroups, cluster, controlplane
from opd_cluster.errors import ClusterError
from opd_cluster.layout import open_layout


def test_controllers_turn_a_deployment_into_pods_and_collect_them_with_their_owner(
    control_plane: Any, namespace: str
) -> None:
    control_plane.kubectl("create", "deployment", "web", "--image=none", "-n", namespace)
    control_plane.kubectl(
        "wait", "-n", namespace, "deployment/web", "--for=jsonpath={.status.replicas}=1", "--timeout=30s"
    )
    control_plane.kubectl("delete", "-n", namespace, "deployment/web", "--cascade=foreground", "--timeout=30s")
    assert json.loads(control_plane.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"] == []


def test_blocking_owner_references_need_the_finalizers_permission(control_plane: Any, namespace: str) -> None:
    control_plane.kubectl("create", "configmap", "owner", "-n", namespace)
    uid = control_plane.kubectl("get", "configmap", "owner", "-n", namespace, "-o", "jsonpath={.metadata.uid}")
    control_plane.kubectl("create", "role", "writer", "--verb=create", "--resource=secrets", "-n", namespace)
    control_plane.kubectl("create", "rolebinding", "writer", "--role=writer", "--user=someone", "-n", namespace)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid, "blockOwnerDeletion": True}
    child = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "child", "ownerReferences": [owner]}}
    with pytest.raises(ClusterError, match="cannot set blockOwnerDeletion"):
        control_plane.kubectl("create", "-n", namespace, "--as=someone", "-f", "-", input_text=json.dumps(child))


def test_a_ray_job_is_accepted_and_validated_by_its_crd(control_plane: Any, namespace: str) -> None:
    wrong = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "job"}, "spec": {"submissionMode": 7}}
    with pytest.raises(ClusterError, match="submissionMode"):
        control_plane.kubectl("create", "-n", namespace, "-f", "-", input_text=json.dumps(wrong))


def test_up_removes_what_a_killed_run_left_and_down_leaves_nothing() -> None:
    name = f"it-{os.getpid()}-again"
    layout = cluster.control_plane_up(name)
    try:
        victim = min(cgroups.members(layout.cgroup))
        os.kill(victim, signal.SIGKILL)
        assert not cluster.is_up(layout)
        assert cluster.control_plane_up(name) == layout
        assert controlplane.api_ready(layout)
        assert cluster.leftovers(layout)
    finally:
        cluster.down(name)
    assert cluster.leftovers(layout) == []
    assert open_layout(name) == layout
    cluster.down(name, purge=True)
    assert not layout.state.exists()
