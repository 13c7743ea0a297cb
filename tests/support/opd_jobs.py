"""OPDJobs on tiny models, and the verbs of a person who watches them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRAINER_PYTHON = ROOT / ".venv-trainer/bin/python"
#: Seconds. Two shared cores start a Ray cluster and load torch in pods; a healthy job takes a fifth of these.
START_DEADLINE = 420.0
END_DEADLINE = 600.0
FREE_DEADLINE = 90.0


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Base with changes; objects by key, anything else replaced, None removed."""
    out = dict(base)
    for key, value in changes.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = merged(out[key], value)
        else:
            out[key] = value
    return out


def tiny_job(name: str = "tiny", **changes: Any) -> dict[str, Any]:
    """A whole run on tiny models; keyword sections are merged into the spec."""
    spec: dict[str, Any] = {
        "runtime": {"device": "cpu", "acceleratorResource": "nvidia.com/gpu"},
        "storage": {"claimName": "opd-local"},
        "student": {"model": {"source": "/data/tiny/student", "dtype": "fp32"}},
        "teachers": [
            {"name": "main", "backend": "transformers", "model": {"source": "/data/tiny/teacher", "dtype": "fp32"}}
        ],
        "distillation": {"signal": "loss", "tokenSelection": "teacher_topk", "topK": 16},
        "data": {"source": "/data/tiny/prompts.jsonl", "maxPromptTokens": 64},
        "rollout": {"engine": "transformers", "maxResponseTokens": 8},
        "training": {
            "steps": 4,
            "promptsPerStep": 4,
            "learningRate": 0.003,
            "dtype": "fp32",
            "activationCheckpointing": False,
            "checkpoint": {"everySteps": 2},
        },
        "preflight": {"samples": 2},
        "lifecycle": {"preemptionGraceSeconds": 60},
    }
    return {
        "apiVersion": "opd.dev/v1alpha1",
        "kind": "OPDJob",
        "metadata": {"name": name},
        "spec": merged(spec, changes),
    }


#: Long enough to be interrupted in the middle, short enough to be finished afterwards.
LONG_TRAINING = {"steps": 100, "promptsPerStep": 8, "checkpoint": {"everySteps": 3}}


def moment(text: str) -> datetime:
    """A Kubernetes timestamp."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


@dataclass
class Watcher:
    """One OPDJob of one namespace as a person sees it."""

    cluster: Any
    namespace: str
    name: str

    def object(self) -> dict[str, Any]:
        return dict(self.cluster.get(self.namespace, "opdjob", self.name))

    def status(self) -> dict[str, Any]:
        return dict(self.object().get("status") or {})

    def condition(self, kind: str) -> dict[str, Any]:
        """The condition of a type, {} while there is none."""
        return next((c for c in self.status().get("conditions", []) if c["type"] == kind), {})

    def step(self) -> int:
        """The newest finished step, from the run's own file: the status may be half a minute old."""
        rows = self.metrics()
        return int(rows[-1]["step"]) if rows else 0

    def wait_phase(self, *phases: str, seconds: float = END_DEADLINE) -> dict[str, Any]:
        """Wait until the phase is one of these; a terminal phase that was not asked for fails at once."""

        def reached() -> bool:
            phase = self.status().get("phase")
            assert phase in phases or phase not in ("Failed", "Succeeded"), (
                f"{self.name} is {phase}: {self.condition('Failed')}"
            )
            return phase in phases

        self.cluster.wait(f"{self.name} in phase {' or '.join(phases)}", reached, seconds, self.namespace)
        return self.status()

    def wait_step(self, step: int, seconds: float = START_DEADLINE) -> None:
        self.cluster.wait(f"step {step} of {self.name}", lambda: self.step() >= step, seconds, self.namespace)

    def newest_checkpoint(self) -> int:
        """Step of the newest complete checkpoint in the run directory; 0 while there is none."""
        folders = (self.run_directory() / "checkpoints").glob("step-*.a*")
        steps = [int(folder.name.removeprefix("step-").split(".a")[0]) for folder in folders if folder.suffix != ".tmp"]
        return max(steps, default=0)

    def wait_checkpoint(self, step: int = 1, seconds: float = START_DEADLINE) -> int:
        """Wait for a checkpoint of at least this step; its step."""
        self.cluster.wait(
            f"a checkpoint of {self.name}", lambda: self.newest_checkpoint() >= step, seconds, self.namespace
        )
        return self.newest_checkpoint()

    def patch(self, spec: dict[str, Any]) -> None:
        self.cluster.kubectl(
            "patch", "opdjob", self.name, "-n", self.namespace, "--type=merge", "-p", json.dumps({"spec": spec})
        )

    def pods(self, role: str = "") -> list[dict[str, Any]]:
        selector = f"opd.dev/job={self.name}" + (f",opd.dev/role={role}" if role else "")
        return list(self.cluster.get(self.namespace, "pods", selector=selector))

    def gpu_pods(self) -> list[str]:
        """Pods of the job that hold accelerator units: bound to a node and not ended."""
        return [
            pod["metadata"]["name"]
            for pod in self.pods()
            if pod["spec"].get("nodeName")
            and pod["status"].get("phase") not in ("Succeeded", "Failed")
            and any(
                "nvidia.com/gpu" in (c.get("resources", {}).get("requests") or {}) for c in pod["spec"]["containers"]
            )
        ]

    def wait_free(self, seconds: float = FREE_DEADLINE) -> None:
        self.cluster.wait(f"{self.name} to free its GPUs", lambda: not self.gpu_pods(), seconds, self.namespace)

    def ray_jobs(self) -> list[dict[str, Any]]:
        return list(self.cluster.get(self.namespace, "rayjobs"))

    def run_directory(self) -> Path:
        """The run directory on this machine."""
        uid = self.object()["metadata"]["uid"]
        return Path(self.cluster.data) / "opd" / self.namespace / f"{self.name}-{uid[:8]}"

    def metrics(self) -> list[dict[str, Any]]:
        """Training rows of metrics.jsonl: the last line of each step counts."""
        file = self.run_directory() / "logs" / "metrics.jsonl"
        # A line that is being written has no end yet.
        lines = (
            [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            if file.exists()
            else []
        )
        rows = {row["step"]: row for row in map(json.loads, lines) if "opd_reverse_kl" in row}
        return [rows[step] for step in sorted(rows)]

    def consumed(self) -> list[int]:
        """Sample ids of every step, the last record of each (step, sample)."""
        lines = (self.run_directory() / "logs" / "samples.jsonl").read_text().splitlines()
        rows = {(r["step"], r["sample_id"]): r for r in map(json.loads, lines) if not r.get("evaluation")}
        return [sample for (_, sample), row in rows.items() if row.get("state", "consumed") == "consumed"]
