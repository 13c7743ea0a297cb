"""The SGLang image serves scores from a pod on the GPU pool (CPU, with the test-only stand-in for its kernels)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

IDS = [10, 20, 30, 40, 50]
SERVER = """exec python -m sglang.launch_server --model-path /data/{folder}/model --host 0.0.0.0 --port 8000 --device cpu
 --attention-backend torch_native --sampling-backend pytorch --dtype float32 --max-total-tokens 4096
 --disable-overlap-schedule --skip-server-warmup""".replace("\n", "")
DIRECT = """
import json, sys
from pathlib import Path
sys.path.insert(0, "/data/{folder}")
from opd_testing.tiny_models import direct_logprobs, write_model
folder, ids = write_model(Path("/data/{folder}/model"), seed=7, family="qwen2", tied=False), {ids}
table = direct_logprobs(folder, ids)
print("SCORES", json.dumps([table[row, token].item() for row, token in enumerate(ids[1:])]))
"""


@pytest.fixture
def support_files(running_cluster: Any) -> str:
    """A folder on the claim, writable in pods, with the tests' own helpers in it."""
    folder = running_cluster.data / "sglang-test"
    package = Path(__file__).resolve().parents[2] / "support" / "opd_testing"
    shutil.copytree(package, folder / package.name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    os.chown(folder, 1000, 1000)
    return folder.name


def pod(name: str, script: str, image: str, **env: str) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["tini", "--", "bash", "-ec", script],
        "env": [{"name": key, "value": value} for key, value in {"OMP_NUM_THREADS": "1", **env}.items()],
        "resources": {"requests": {"cpu": "50m", "nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 2, "timeoutSeconds": 10},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "opd-local"}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_sglang_scores_in_a_pod_equal_a_direct_forward_pass(
    running_cluster: Any, namespace: str, sglang_image: str, sgl_kernel_standin: str, support_files: str
) -> None:
    def state(name: str) -> tuple[str, bool]:
        status = running_cluster.get(namespace, "pod", name)["status"]
        return status["phase"], all(item["ready"] for item in status.get("containerStatuses", [{"ready": False}]))

    program = DIRECT.format(folder=support_files, ids=IDS)
    running_cluster.apply(namespace, pod("direct", f"python -c '{program}'", sglang_image))
    running_cluster.wait("direct scores", lambda: state("direct")[0] == "Succeeded", 120, namespace)
    log = running_cluster.kubectl("logs", "-n", namespace, "direct")
    direct = json.loads(log.split("SCORES ", 1)[1].splitlines()[0])

    server = SERVER.format(folder=support_files)
    environment = {"PYTHONPATH": sgl_kernel_standin, "SGLANG_USE_CPU_ENGINE": "1"}
    running_cluster.apply(namespace, pod("server", server, sglang_image, **environment))
    running_cluster.wait("SGLang is ready", lambda: state("server")[1], 300, namespace)
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    post = ["wget", "-q", "-O", "-", "--header", "Content-Type: application/json", "--post-data", json.dumps(body)]
    answer = running_cluster.kubectl("exec", "-n", namespace, "server", "--", *post, "http://127.0.0.1:8000/generate")
    served = [entry[0] for entry in json.loads(answer)["meta_info"]["input_token_logprobs"]][1:]
    assert served == pytest.approx(direct, abs=1e-4)
