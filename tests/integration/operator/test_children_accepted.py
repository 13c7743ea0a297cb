"""The golden children at a real API server: no unknown field, no wrong value, and pods that the strictest standard admits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

GOLDEN = Path(__file__).parents[2] / "unit" / "operator" / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.yaml"))


def children(name: str, namespace: str) -> list[dict[str, Any]]:
    found = list(yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text()))
    for item in found:
        item["metadata"]["namespace"] = namespace
        for subject in item.get("subjects", []):
            subject["namespace"] = namespace
    return found


def pods(name: str, namespace: str) -> list[dict[str, Any]]:
    """One pod per template, with what KubeRay and the Job controller would add to make it valid."""
    templates = []
    for item in children(name, namespace):
        if item["kind"] in ("Job", "Deployment"):
            templates.append(item["spec"]["template"])
        if item["kind"] == "RayJob":
            cluster = item["spec"]["rayClusterSpec"]
            templates += [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]]
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], "name": f"pod-{index}", "namespace": namespace},
            "spec": {key: value for key, value in template["spec"].items() if key not in UNMET},
        }
        for index, template in enumerate(templates)
    ]


#: Objects of the user's that do not exist in the test's namespace.
UNMET = frozenset({"serviceAccountName", "priorityClassName"})


@pytest.mark.parametrize("name", NAMES)
def test_the_api_server_takes_every_child(control_plane: Any, make_namespace: Callable[[], str], name: str) -> None:
    documents = yaml.safe_dump_all(children(name, make_namespace()))
    said = control_plane.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", input_text=documents)
    assert len(said.splitlines()) == len(list(yaml.safe_load_all(documents)))


@pytest.mark.parametrize("name", NAMES)
def test_pods_are_admitted_where_pod_security_is_restricted(
    control_plane: Any, make_namespace: Callable[[], str], name: str
) -> None:
    namespace = make_namespace()
    control_plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    for pod in pods(name, namespace):
        # A hostPath volume is the user's own choice and is what that standard exists to refuse.
        spec = pod["spec"]
        host = {volume["name"] for volume in spec["volumes"] if "hostPath" in volume}
        spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] not in host]
        for container in spec["containers"]:
            container["volumeMounts"] = [item for item in container["volumeMounts"] if item["name"] not in host]
        text = yaml.safe_dump(pod)
        said = control_plane.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", input_text=text)
        assert "created" in said
