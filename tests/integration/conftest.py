"""One real API server (with etcd and the controllers) per session, one namespace per test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from opd_cluster import cluster
from opd_cluster.errors import ClusterError
from opd_cluster.layout import Layout

PREFIX = "it-"


@dataclass(frozen=True)
class ControlPlane:
    """A running API server with the KubeRay and OPDJob CRDs; the kubeconfig logs in as administrator."""

    layout: Layout

    @property
    def kubeconfig(self) -> Path:
        return self.layout.kubeconfig

    @property
    def server(self) -> str:
        return self.layout.server

    def kubectl(self, *arguments: str, input_text: str | None = None) -> str:
        """kubectl as administrator; raises ClusterError with its message when it fails."""
        return cluster.kubectl(self.layout, *arguments, input_text=input_text)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """Starts in seconds, in a network namespace of its own, and leaves nothing; what killed sessions left is removed first."""
    name = f"{PREFIX}{os.getpid()}"
    try:
        cluster.sweep(PREFIX)
        layout = cluster.control_plane_up(name)
    except ClusterError as error:
        pytest.fail(f"{error}\n{error.hint}", pytrace=False)
    yield ControlPlane(layout)
    cluster.down(name, purge=True)


@pytest.fixture
def make_namespace(control_plane: ControlPlane) -> Iterator[Callable[[], str]]:
    """Makes namespaces of this test; they are gone (in the background) after it."""
    made: list[str] = []

    def make() -> str:
        made.append(f"test-{uuid.uuid4().hex[:8]}")
        control_plane.kubectl("create", "namespace", made[-1])
        return made[-1]

    yield make
    if made:
        control_plane.kubectl("delete", "namespace", "--wait=false", "--ignore-not-found", *made)


@pytest.fixture
def namespace(make_namespace: Callable[[], str]) -> str:
    """A fresh namespace of this test."""
    return make_namespace()
