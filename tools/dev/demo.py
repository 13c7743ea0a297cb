"""`make demo`: examples/quickstart.yaml on a real Kubernetes, from nothing to a distilled student and its report.

Without --context the embedded cluster is built and started (root, Linux; see tools/cluster/README.md). With --context NAME a
cluster of yours is used: its nodes must be able to pull the operator and trainer images named by OPERATOR_IMAGE and
TRAINER_IMAGE, and the namespace must have a ReadWriteMany claim `opd-local`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opd_operator.children.pods import CONTAINER_SECURITY, POD_SECURITY

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples/quickstart.yaml"
NAME = "quickstart"
#: Deadlines in seconds. The job's own deadlines end it earlier; these only keep a broken cluster from hanging the demo.
JOB_DEADLINE = 3600
DELETE_DEADLINE = 180


class DemoError(Exception):
    """Ends the demo; the message says what to do next."""


@dataclass
class Stages:
    """Seconds and disk of each stage, for the table at the end."""

    rows: list[tuple[str, float, float]] = field(default_factory=list)

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        print(f"\n── {title}", flush=True)
        started, free = time.monotonic(), shutil.disk_usage(ROOT).free
        yield
        self.rows.append((title, time.monotonic() - started, (free - shutil.disk_usage(ROOT).free) / 1e9))

    def table(self) -> str:
        lines = [f"{title:<44} {seconds:7.0f} s {disk:+7.1f} GB" for title, seconds, disk in self.rows]
        total = sum(row[1] for row in self.rows), sum(row[2] for row in self.rows)
        return "\n".join([*lines, f"{'total':<44} {total[0]:7.0f} s {total[1]:+7.1f} GB"])


def run(*command: str, **options: object) -> str:
    """Run a command, its stderr on ours; returns stdout."""
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, cwd=ROOT, **options).stdout  # type: ignore[call-overload, no-any-return]


def job_status(kubectl: list[str]) -> dict[str, object]:
    """The job's status; {} while it has none."""
    return dict(json.loads(run(*kubectl, "get", "opdjob", NAME, "-o", "json")).get("status") or {})


def describe(status: dict[str, object]) -> str:
    """One line for people: phase, teachers, step, reverse KL, and what it waits for."""
    training = status.get("training") or {}
    parts = [f"{status.get('phase', 'Pending'):<17}", f"teachers {status.get('teachersReady', '-'):<5}"]
    parts.append(f"step {status.get('stepProgress', '-'):<7} reverse KL {training.get('reverseKl', '-')}")  # type: ignore[attr-defined]
    ended = status.get("phase") in ("Succeeded", "Failed")
    waiting = [
        c
        for c in status.get("conditions", [])  # type: ignore[attr-defined]
        if not ended and c["type"] == "Progressing" and c["status"] == "False"
    ]
    return "  ".join([*parts, *(f"({c['reason']}: {c['message'][:100]})" for c in waiting)])


def follow(kubectl: list[str]) -> dict[str, object]:
    """Print each change until the job ends. Raises DemoError when it does not."""
    deadline, last = time.monotonic() + JOB_DEADLINE, ""
    started = time.monotonic()
    while time.monotonic() < deadline:
        status = job_status(kubectl)
        line = describe(status)
        if line != last:
            print(f"{time.monotonic() - started:6.0f} s  {line}", flush=True)
            last = line
        if status.get("phase") in ("Succeeded", "Failed"):
            return status
        time.sleep(1)
    raise DemoError(
        f"the job did not end within {JOB_DEADLINE} s; kubectl describe opdjob {NAME} says what it waits for"
    )


def remove_earlier_job(kubectl: list[str]) -> None:
    """A finished demo leaves its job behind for a look; a new demo starts with a new one."""
    run(
        *kubectl,
        "delete",
        "opdjob",
        NAME,
        "--ignore-not-found",
        "--cascade=foreground",
        f"--timeout={DELETE_DEADLINE}s",
    )


def result_files(status: dict[str, Any], claim: Path | None) -> dict[str, str]:
    """Paths of report, checkpoint and export: on this machine where the claim is a folder of it."""
    paths = {key: value for key, value in (status.get("result") or {}).items() if isinstance(value, str)}
    return {key: str(claim / path.removeprefix("/data/")) if claim else path for key, path in paths.items()}


def reverse_kl(status: dict[str, Any]) -> tuple[float, float] | None:
    """Reverse KL on the held-out prompts before the first step and after the last; None when nothing was evaluated."""
    held_out = (status.get("result") or {}).get("heldOutReverseKl") or {}
    return (float(held_out["before"]), float(held_out["after"])) if held_out.get("after") else None


@dataclass(frozen=True)
class Target:
    """The cluster that the demo runs on."""

    kubectl: list[str]
    #: The claim's folder on this machine; None in a cluster of the user's.
    claim: Path | None


def embedded_cluster(stages: Stages) -> Target:
    """Start the embedded cluster with our images and our operator on it."""
    with stages.stage("cluster: API server, two nodes, KubeRay, images"):
        subprocess.run(
            ["opd-cluster", "up", "--nodes", "2", "--gpus", "8", "--images", "operator,trainer"], check=True, cwd=ROOT
        )
    with stages.stage("operator: helm install"):
        subprocess.run(["opd-cluster", "install"], check=True, cwd=ROOT)
    claim = Path(run("opd-cluster", "claim", "default").strip())
    kubeconfig = run("opd-cluster", "kubeconfig").strip()
    return Target(["kubectl", "--kubeconfig", kubeconfig, "-n", "default"], claim)


def users_cluster(stages: Stages, context: str) -> Target:
    """Install the chart into a cluster of the user's."""
    if shutil.which("helm") is None:
        raise DemoError("CONTEXT= needs helm on PATH; without CONTEXT the embedded cluster builds its own")
    missing = [name for name in ("OPERATOR_IMAGE", "TRAINER_IMAGE") if not os.environ.get(name)]
    if missing:
        raise DemoError(
            f"set {' and '.join(missing)} to images that the nodes of {context} can pull (operator/Dockerfile, trainer_image/Dockerfile)"
        )
    with stages.stage("operator: helm upgrade --install"):
        subprocess.run(
            ["helm", "upgrade", "--install", "opd", str(ROOT / "charts/opd-operator"), "--kube-context", context,
             "--namespace", "opd-system", "--create-namespace", "--wait",
             "--set", f"images.operator={os.environ['OPERATOR_IMAGE']}", "--set", f"images.trainer={os.environ['TRAINER_IMAGE']}"],
            check=True,
        )  # fmt: skip
    return Target(["kubectl", "--context", context], None)


def fill_claim(target: Target) -> None:
    """Models and prompts onto the claim."""
    python = str(ROOT / ".venv-trainer/bin/python")
    folder = target.claim or ROOT / "opd-data"
    subprocess.run([python, str(ROOT / "examples/quickstart/prepare.py"), str(folder)], check=True)
    if target.claim:
        return
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "opd-demo-copy"},
        "spec": {
            "securityContext": POD_SECURITY,
            "containers": [{"name": "copy", "securityContext": CONTAINER_SECURITY, "image": os.environ["TRAINER_IMAGE"], "command": ["sleep", "900"],
                            "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "opd-local"}}],
            "restartPolicy": "Never",
        },
    }  # fmt: skip
    subprocess.run([*target.kubectl, "apply", "-f", "-"], input=json.dumps(pod), text=True, check=True)
    try:
        run(*target.kubectl, "wait", "--for=condition=Ready", "--timeout=600s", "pod/opd-demo-copy")
        for name in ("models", "prompts"):
            run(*target.kubectl, "cp", str(folder / name), f"opd-demo-copy:/data/{name}")
    finally:
        run(*target.kubectl, "delete", "pod", "opd-demo-copy", "--wait=false")


def show_result(status: dict[str, object], target: Target) -> None:
    """Where the results lie, and how far the student came. Raises DemoError unless the job succeeded."""
    files = result_files(status, target.claim)
    if status.get("phase") != "Succeeded":
        failed = [c for c in status.get("conditions", []) if c["type"] == "Failed"]  # type: ignore[attr-defined]
        raise DemoError("the job failed: " + "; ".join(f"{c['reason']}: {c['message']}" for c in failed))
    for key, path in files.items():
        print(f"{key:<14} {'file://' if key == 'report' and target.claim else ''}{path}")
    if scores := reverse_kl(status):
        before, after = scores
        print(
            f"\nreverse KL     {before:.3f} nats a token before, {after:.3f} after, on held-out prompts: {100 * after / before:.0f} % of its start"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", default=os.environ.get("CONTEXT"), help="kubeconfig context of a cluster of yours")
    context = parser.parse_args().context
    stages = Stages()
    try:
        target = users_cluster(stages, context) if context else embedded_cluster(stages)
        with stages.stage("models and prompts on the claim"):
            fill_claim(target)
        with stages.stage("the job"):
            remove_earlier_job(target.kubectl)
            run(*target.kubectl, "apply", "-f", str(JOB))
            status = follow(target.kubectl)
        print()
        show_result(status, target)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(
            f"demo: '{' '.join(error.cmd[:4])} …' ended with {error.returncode}; its words are above", file=sys.stderr
        )
        return 1
    print(f"\n{stages.table()}")
    if not context:
        print(
            f"\nThe cluster still runs; make demo-down removes it. To look around:\n    export PATH={ROOT}/.venv/bin:$PATH"
        )
        print("    opd-cluster kubectl get opd,pods")
    return 0


if __name__ == "__main__":
    sys.exit(main())
