"""The only file that talks to the API server through the client library (watches aside: feed.py).

Values in and out are plain dictionaries: the library's typed models would cost memory and hide unknown fields. Every call
has a deadline, is counted, and is repeated within a budget when the answer is 429, 5xx or none at all. Repeating is safe
because names are deterministic: a create that was taken though its answer got lost is found by the next one.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from opd_operator.errors import TRANSIENT_CODES, ApiError, NotLeader, Unreachable, from_answer
from opd_operator.model import Manifest, ObjectRef
from opd_operator.planned import Deletion
from opd_operator.resources import Resource, resource_of
from opd_operator.retrying import RetryBudget, RetryPolicy

FIELD_MANAGER = "opd-operator"
PAGE_SIZE = 500
_JSON = "application/json"
_MERGE_PATCH = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"
_ONLY_TRY = {"dryRun": "All", "fieldValidation": "Strict"}
_METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}


class CallObserver(Protocol):
    """Receives every call; implemented by the metrics."""

    def api_call(self, verb: str, kind: str, code: str) -> None:
        """One call with its verb, kind (with subresource), and status code or `error`."""
        ...


@dataclass(frozen=True)
class _Call:
    verb: str
    resource: Resource
    path: str
    query: Mapping[str, str]
    body: Any = None
    content_type: str = _JSON
    subresource: str | None = None


class Cluster:
    """One connection pool to one API server."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        observer: CallObserver,
        timeout_seconds: float = 30.0,
        retry: RetryPolicy | None = None,
        budget: RetryBudget | None = None,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._configuration = configuration
        self._client = ApiClient(configuration)
        self._client.user_agent = FIELD_MANAGER
        self._observer = observer
        self._timeout = timeout_seconds
        self._retry = retry or RetryPolicy()
        self._budget = budget or RetryBudget()
        #: Asked before every write of a job's pass: False once the Lease is lost.
        self.may_write = may_write

    @classmethod
    async def connect(cls, **options: Any) -> Cluster:
        """Uses the pod's service account in a cluster, otherwise the kubeconfig that kubectl would use.

        Raises: kubernetes.aio.config.ConfigException when there is neither.
        """
        configuration = Configuration()
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            load_incluster_config(configuration)
        else:
            await load_kube_config(client_configuration=configuration)
        return cls(configuration, **options)

    async def close(self) -> None:
        """Closes the pool."""
        await self._client.close()

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self._configuration.host)

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """The TLS context with the cluster's CA and the client certificate, if any."""
        context: ssl.SSLContext = self._client.rest_client.ssl_context
        return context

    async def authorization(self) -> dict[str, str]:
        """Headers that authenticate a request; a service account's token is read again when it was rotated."""
        headers: dict[str, str] = {}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
        return headers

    # --- reading ---------------------------------------------------------------------------------------------------

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        """The object, or None when there is none (or its kind is not served)."""
        try:
            return await self._send(_Call("get", resource, resource.path(namespace, name), {}))
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def list_pages(
        self, resource: Resource, namespace: str | None, *, label_selector: str = "", field_selector: str = ""
    ) -> AsyncIterator[tuple[list[Manifest], str]]:
        """Pages of objects, each with the resourceVersion of the list. Raises ApiError, 404 when not served."""
        token = ""
        while True:
            query = {"limit": str(PAGE_SIZE)}
            if label_selector:
                query["labelSelector"] = label_selector
            if field_selector:
                query["fieldSelector"] = field_selector
            if token:
                query["continue"] = token
            page = await self._send(_Call("list", resource, resource.path(namespace), query))
            items = page.get("items") or []
            for item in items:
                item.setdefault("apiVersion", resource.api_version)
                item.setdefault("kind", resource.kind)
            metadata = page.get("metadata") or {}
            yield items, metadata.get("resourceVersion", "")
            token = metadata.get("continue") or ""
            if not token:
                return

    # --- writing ---------------------------------------------------------------------------------------------------

    async def create(self, manifest: Manifest, *, fenced: bool = True, dry_run: bool = False) -> Manifest:
        """POST, or with `dry_run` only the question whether it would be taken as it is: a field that the server does not know
        and would drop is refused then. Raises ApiError, with `already_exists` among others."""
        resource = resource_of(manifest["apiVersion"], manifest["kind"])
        path = resource.path(manifest["metadata"].get("namespace"))
        query = {"fieldManager": FIELD_MANAGER} | (_ONLY_TRY if dry_run else {})
        return await self._write(_Call("create", resource, path, query, manifest), fenced)

    async def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply, forced: what the manifest names is ours."""
        resource = resource_of(manifest["apiVersion"], manifest["kind"])
        metadata = manifest["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"])
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._write(_Call("patch", resource, path, query, manifest, _APPLY))

    async def merge_patch(
        self, ref: ObjectRef, patch: Manifest, *, subresource: str | None = None, fenced: bool = True
    ) -> Manifest:
        """JSON merge patch. A resourceVersion or uid inside is a precondition (409 when it does not hold)."""
        resource = resource_of(ref.api_version, ref.kind)
        path = resource.path(ref.namespace, ref.name, subresource)
        query = {"fieldManager": FIELD_MANAGER}
        return await self._write(_Call("patch", resource, path, query, patch, _MERGE_PATCH, subresource), fenced)

    async def replace(self, manifest: Manifest, *, fenced: bool = True) -> Manifest:
        """PUT with the manifest's resourceVersion as precondition."""
        resource = resource_of(manifest["apiVersion"], manifest["kind"])
        metadata = manifest["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"])
        return await self._write(_Call("update", resource, path, {"fieldManager": FIELD_MANAGER}, manifest), fenced)

    async def delete(self, deletion: Deletion) -> Manifest | None:
        """Deletes the object with that UID. None: it was gone, or another object has the name now."""
        ref = deletion.ref
        resource = resource_of(ref.api_version, ref.kind)
        body: Manifest = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": deletion.uid},
            # What hangs on the object goes after it: nothing here waits for a child of a child.
            "propagationPolicy": "Background",
        }
        if deletion.grace_seconds is not None:
            body["gracePeriodSeconds"] = deletion.grace_seconds
        try:
            return await self._write(_Call("delete", resource, resource.path(ref.namespace, ref.name), {}, body))
        except ApiError as error:
            if error.code == 404 or error.conflict:
                return None
            raise

    async def _write(self, call: _Call, fenced: bool = True) -> Manifest:
        return await self._send(call, fenced=fenced)

    # --- transport -------------------------------------------------------------------------------------------------

    async def _send(self, call: _Call, *, fenced: bool = False) -> Manifest:
        self._budget.earn()
        failures = 0
        while True:
            if fenced and not self.may_write():
                raise NotLeader(f"{call.verb} {call.path} was not sent: the Lease is not held")
            try:
                return await self._send_once(call)
            except (ApiError, Unreachable) as error:
                failures += 1
                transient = isinstance(error, Unreachable) or error.code in TRANSIENT_CODES
                if not transient or failures >= self._retry.attempts or not self._budget.spend():
                    raise
                asked = error.retry_after if isinstance(error, ApiError) else None
                await asyncio.sleep(self._retry.delay(failures, asked))

    async def _send_once(self, call: _Call) -> Manifest:
        kind = call.resource.plural + (f"/{call.subresource}" if call.subresource else "")
        code = "error"
        try:
            headers = {"Content-Type": call.content_type, "Accept": _JSON, "User-Agent": FIELD_MANAGER}
            headers |= await self.authorization()
            url = self.server + call.path + (f"?{urlencode(call.query)}" if call.query else "")
            answer = await self._client.call_api(
                _METHODS[call.verb],
                url,
                headers,
                call.body,
                _request_timeout=aiohttp.ClientTimeout(total=self._timeout),
            )
            raw = await answer.read()
            code = str(answer.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{call.verb} {call.path}: {type(error).__name__}: {error}") from error
        finally:
            self._observer.api_call(call.verb, kind, code)
        body = _decode(raw)
        if answer.status >= 400:
            raise from_answer(answer.status, raw.decode(errors="replace"), body)
        if not isinstance(body, dict):
            raise Unreachable(f"{call.verb} {call.path}: the answer is no JSON object")
        return body


def _decode(raw: bytes) -> Any:
    """JSON, or None for what is none."""
    try:
        return json.loads(raw)
    except ValueError:
        return None
