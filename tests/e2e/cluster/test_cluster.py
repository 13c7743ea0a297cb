"""The embedded cluster does what a real one does: GPUs, DNS, NetworkPolicies, shared storage, KubeRay."""

from __future__ import annotations

import os
from typing import Any

import pytest

from opd_cluster import cluster, daemons, full

TRAINER = "opd-trainer:0.1.0"
USER = {
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "fsGroup": 1000,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
LOCKED_DOWN = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
TOLERATIONS = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
DATA = [{"name": "data", "persistentVolumeClaim": {"claimName": "opd-local"}}]


def pod(
    name: str, script: str, *, gpus: int = 0, image: str = TRAINER, labels: dict[str, str] | None = None
) -> dict[str, Any]:
    amounts = {"cpu": "50m", "memory": "64Mi", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["tini", "--", "bash", "-ec", script],
        "resources": {"requests": amounts, "limits": {"nvidia.com/gpu": str(gpus)} if gpus else {}},
        "securityContext": LOCKED_DOWN,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "ports": [{"containerPort": 8000}],
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "securityContext": USER,
        "containers": [container],
        "volumes": DATA,
        **({"tolerations": TOLERATIONS} if gpus else {"nodeSelector": {"opd.dev/pool": "cpu"}}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {"app": name}},
        "spec": spec,
    }


def phase(cluster: Any, namespace: str, name: str) -> str:
    return str(cluster.get(namespace, "pod", name)["status"]["phase"])


def run_to_end(cluster: Any, namespace: str, manifest: dict[str, Any], seconds: float = 60) -> str:
    """Phase Succeeded is required; the log is returned."""
    name = manifest["metadata"]["name"]
    cluster.apply(namespace, manifest)
    cluster.wait(
        f"pod {name} ends", lambda: phase(cluster, namespace, name) in ("Succeeded", "Failed"), seconds, namespace
    )
    log = str(cluster.kubectl("logs", "-n", namespace, name))
    assert phase(cluster, namespace, name) == "Succeeded", log
    return log


@pytest.mark.smoke
def test_each_kubelet_listens_for_device_plugins_at_a_place_of_its_own(running_cluster: Any) -> None:
    """At the same place, two that start together end one another, and a node's own kubelet loses its devices."""
    layout = running_cluster.layout
    if layout is None:
        pytest.skip("the embedded cluster's kubelets share a machine")
    members = full.nodes(layout, cluster.recorded_shape(layout) or cluster.Shape())
    kubelets = [daemons.pid(layout, f"kubelet-{member.name}") for member in members]
    sockets = [f"/proc/{pid}/root/var/lib/kubelet/device-plugins/kubelet.sock" for pid in kubelets]
    listening = {(found.st_dev, found.st_ino) for found in map(os.stat, sockets)}
    assert len(listening) == len(members) > 1
    assert os.stat("/var/lib/kubelet").st_dev not in {device for device, _ in listening}


@pytest.mark.smoke
def test_the_claim_is_one_writable_directory_on_every_node(running_cluster: Any, namespace: str) -> None:
    run_to_end(
        running_cluster,
        namespace,
        pod("writer", f"id -u; mkdir -p /data/{namespace}; echo written > /data/{namespace}/file"),
    )
    log = run_to_end(
        running_cluster, namespace, pod("reader", f"cat /data/{namespace}/file; stat -c %g /data/{namespace}", gpus=1)
    )
    assert log.split() == ["written", "1000"]
    nodes = {running_cluster.get(namespace, "pod", name)["spec"]["nodeName"] for name in ("writer", "reader")}
    assert len(nodes) == 2
    assert (running_cluster.data / namespace / "file").read_text() == "written\n"


@pytest.mark.smoke
def test_gpu_units_are_counted_and_a_ninth_waits(running_cluster: Any, namespace: str) -> None:
    running_cluster.apply(namespace, pod("eight", "sleep 3600", gpus=8), pod("one", "sleep 3600", gpus=1))
    running_cluster.wait("eight runs", lambda: phase(running_cluster, namespace, "eight") == "Running", 60, namespace)

    def message() -> str:
        conditions = running_cluster.get(namespace, "pod", "one")["status"].get("conditions", [])
        return " ".join(condition.get("message", "") for condition in conditions)

    running_cluster.wait("one is unschedulable", lambda: "Insufficient nvidia.com/gpu" in message(), 30, namespace)
    running_cluster.kubectl("delete", "pod", "eight", "-n", namespace)
    running_cluster.wait("one runs", lambda: phase(running_cluster, namespace, "one") == "Running", 60, namespace)


@pytest.mark.smoke
def test_a_pod_without_toleration_stays_off_the_gpu_node(running_cluster: Any, namespace: str) -> None:
    manifest = pod("stray", "true")
    manifest["spec"]["nodeSelector"] = {"opd.dev/pool": "gpu"}
    running_cluster.apply(namespace, manifest)

    def refused() -> bool:
        conditions = running_cluster.get(namespace, "pod", "stray")["status"].get("conditions", [])
        return any("untolerated taint" in condition.get("message", "") for condition in conditions)

    running_cluster.wait("the taint keeps it off", refused, 30, namespace)


@pytest.mark.smoke
def test_network_policies_and_service_names_work_between_nodes(running_cluster: Any, namespace: str) -> None:
    server = pod("server", "cd /tmp && echo page > index.html && exec python -m http.server 8000", gpus=1)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "server"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    headless = {**service, "metadata": {"name": "headless"}, "spec": {**service["spec"], "clusterIP": "None"}}
    friends = [{"podSelector": {"matchLabels": {"friend": "yes"}}}]
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "friends"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "server"}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": friends}],
        },
    }
    running_cluster.apply(namespace, server, service, headless, policy)
    fetch = "for try in $(seq 30); do wget -q -T 2 -t 1 -O - http://{0} && exit 0; sleep 1; done; exit 1"
    friend = {"friend": "yes"}
    by_address = pod("friend", fetch.format("server"), labels=friend)
    by_name = pod("friend-headless", fetch.format(f"headless.{namespace}.svc.cluster.local:8000"), labels=friend)
    assert run_to_end(running_cluster, namespace, by_address) == "page\n"
    assert run_to_end(running_cluster, namespace, by_name) == "page\n"
    run_to_end(running_cluster, namespace, pod("stranger", "! wget -q -T 3 -t 1 -O - http://server"))


@pytest.mark.smoke
def test_an_image_that_nobody_loaded_is_refused_at_once(running_cluster: Any, namespace: str) -> None:
    running_cluster.apply(namespace, pod("nobody", "true", image="no-such-image:1"))

    def reason() -> str:
        statuses = running_cluster.get(namespace, "pod", "nobody")["status"].get("containerStatuses", [])
        return "".join(status["state"].get("waiting", {}).get("reason", "") for status in statuses)

    running_cluster.wait("the pull fails", lambda: reason() in ("ErrImagePull", "ImagePullBackOff"), 20, namespace)


SCRIPT = """python -c "
import ray
ray.init()
@ray.remote(resources={'gpu_pool': 1})
def where():
    import os, socket, torch
    return socket.gethostname(), os.getuid(), torch.__version__
print('REMOTE', ray.get(where.remote()))
" """


def ray_job(entrypoint: str) -> dict[str, Any]:
    def group(name: str, *, gpus: int, **params: str) -> dict[str, Any]:
        template = pod(name, "", gpus=gpus)["spec"]
        container = template["containers"][0]
        del container["command"], container["ports"], template["restartPolicy"]
        container["resources"]["requests"]["memory"] = "1Gi"
        container["resources"]["limits"]["memory"] = "3Gi"
        return {"rayStartParams": {"num-cpus": "1", **params}, "template": {"spec": template}}

    worker = group("worker", gpus=1, resources='"{\\"gpu_pool\\": 1}"')
    spec = {
        "submissionMode": "HTTPMode",
        "backoffLimit": 0,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 0,
        "entrypoint": entrypoint,
        "rayClusterSpec": {
            "rayVersion": "2.60.0",
            "headGroupSpec": group("head", gpus=0, **{"dashboard-host": "0.0.0.0"}),
            "workerGroupSpecs": [{"groupName": "gpu", "replicas": 1, "minReplicas": 1, "maxReplicas": 1, **worker}],
        },
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "trivial"}, "spec": spec}


@pytest.mark.smoke
def test_a_ray_job_runs_on_the_gpu_pool_and_frees_it(running_cluster: Any, namespace: str) -> None:
    running_cluster.apply(namespace, ray_job(SCRIPT))

    def status(field: str) -> str:
        return str(running_cluster.get(namespace, "rayjob", "trivial").get("status", {}).get(field, ""))

    running_cluster.wait(
        "the RayJob ends", lambda: status("jobStatus") in ("SUCCEEDED", "FAILED", "STOPPED"), 240, namespace
    )
    assert status("jobStatus") == "SUCCEEDED", running_cluster.describe(namespace)
    running_cluster.wait("its pods are gone", lambda: running_cluster.get(namespace, "pods") == [], 60, namespace)
