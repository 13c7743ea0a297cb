"""A running cluster in end-to-end tests: the embedded one, or one of the user's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from opd_cluster import cluster, full
from opd_cluster.errors import ClusterError
from opd_cluster.layout import Layout, existing, open_layout
from opd_cluster.shell import find_kubectl, run, wait_for


class Cluster:
    """A running cluster and the few verbs that tests use on it."""

    def __init__(self, layout: Layout | None, context: str = "") -> None:
        self.layout, self.context = layout, context

    @property
    def data(self) -> Path:
        """The host directory behind every claim opd-local (embedded cluster only)."""
        if self.layout is None:
            pytest.skip("needs the embedded cluster's host directory")
        return self.layout.data

    def kubectl(self, *arguments: str, input_text: str | None = None, check: bool = True, timeout: float = 120) -> str:
        """kubectl as administrator; its stdout. Raises ClusterError with its message when it fails and `check` is on."""
        where = ["--kubeconfig", str(self.layout.kubeconfig)] if self.layout else ["--context", self.context]
        return run([find_kubectl(), *where, *arguments], input_text=input_text, check=check, timeout=timeout).stdout

    def apply(self, namespace: str, *manifests: dict[str, Any]) -> None:
        document = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "-n", namespace, "-f", "-", input_text=json.dumps(document))

    def get(self, namespace: str, kind: str, name: str = "", selector: str = "") -> Any:
        """The object, or the list of objects of a kind (optionally with a label selector)."""
        words = [kind, *([name] if name else []), *(["-l", selector] if selector else [])]
        answer = json.loads(self.kubectl("get", "-n", namespace, "-o", "json", *words))
        return answer if name else answer["items"]

    def wait(self, what: str, condition: Callable[[], object], seconds: float, namespace: str = "") -> None:
        """Poll until the condition holds; a timeout tells what the namespace looks like."""
        wait_for(what, condition, seconds=seconds, hint=lambda: self.describe(namespace) if namespace else "")

    def describe(self, namespace: str) -> str:
        """Objects, events and the last log lines of a namespace: what a person would look at first."""
        parts = [
            self.kubectl(
                "get", "opd,rayjobs,deployments,jobs,pods,configmaps", "-n", namespace, "-o", "wide", check=False
            )
        ]
        parts.append(self.kubectl("get", "events", "-n", namespace, "--sort-by=.lastTimestamp", check=False)[-6000:])
        for pod in self.get(namespace, "pods"):
            name = pod["metadata"]["name"]
            log = self.kubectl("logs", "-n", namespace, name, "--all-containers", "--tail=40", check=False)
            parts.append(f"--- {name}\n{log}")
        return "\n".join(parts)


@contextmanager
def embedded(name: str, shape: cluster.Shape) -> Iterator[Cluster]:
    """The embedded cluster of that name with our images: reused if it runs already, else started and removed."""
    was_up = name in existing() and cluster.is_up(open_layout(name))
    try:
        layout = full.up(name, shape)
        full.load(layout, ["opd-operator", "opd-trainer"])
    except ClusterError as error:
        pytest.fail(f"{error}\n{error.hint}", pytrace=False)
    yield Cluster(layout)
    if not was_up:
        cluster.down(name)
