"""Administrator's access to a real API server, for tests and for the player."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_kube_config

from opd_operator.cluster import Cluster
from opd_operator.errors import ApiError
from opd_operator.model import ObjectRef
from opd_operator.planned import Deletion
from opd_operator.resources import RESOURCES, Resource

Manifest = dict[str, Any]


class NoCalls:
    """The player's calls are nobody's business."""

    def api_call(self, verb: str, kind: str, code: str) -> None:
        """Not counted."""


def resource(api_version: str, kind: str) -> Resource:
    """A kind that the operator knows as well."""
    return RESOURCES[api_version, kind]


class Api:
    """Administrator's access for tests and the player."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, kubeconfig: Path) -> AsyncIterator[Api]:
        configuration = Configuration()
        await load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
        cluster = Cluster(configuration, observer=NoCalls())
        yield cls(cluster)
        await cluster.close()

    async def list(self, api_version: str, kind: str, namespace: str, selector: str = "") -> list[Manifest]:
        found: list[Manifest] = []
        try:
            async for items, _ in self.cluster.list_pages(
                resource(api_version, kind), namespace, label_selector=selector
            ):
                found += items
        except ApiError as error:
            if error.code != 404:
                raise
        return found

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Manifest | None:
        return await self.cluster.get(resource(api_version, kind), namespace, name)

    async def create(self, manifest: Manifest) -> Manifest:
        return await self.cluster.create(manifest)

    async def patch(self, found: Manifest, patch: Manifest, subresource: str | None = None) -> Manifest | None:
        """Merge patch; None when the object is gone."""
        try:
            return await self.cluster.merge_patch(ObjectRef.of(found), patch, subresource=subresource)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def delete(self, found: Manifest, grace_seconds: int | None = None) -> None:
        await self.cluster.delete(Deletion(ObjectRef.of(found), found["metadata"]["uid"], grace_seconds=grace_seconds))

    async def post(self, path: str, body: Manifest) -> Manifest:
        """POST to a path that the operator has no business with (bindings, reviews); the answer."""
        answer = await self.cluster._client.call_api(
            "POST", self.cluster.server + path, {"Content-Type": "application/json"}, body
        )
        found: Manifest = json.loads(await answer.read())
        return found
