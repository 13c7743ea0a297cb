"""Values of Secrets are in Secrets only: every object of the namespace, the operator's logs, metrics and process are searched."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operator_api import Api
from operator_jobs import Job
from operator_player import Player

Manifest = dict[str, Any]
#: Of people: a hub's token, and the key of a teacher that somebody else serves.
THEIRS = {"hub": "hf-7d1c5f20ab934e6e8f51", "far": "sk-e2b8c04d97f14a5cb3a6"}
SECRETIVE = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY|ADMIN_?KEY")


@pytest.fixture
async def job(api: Api, namespace: str, create_job: Any) -> Job:
    """A job with every kind of secret: made by the operator, of an external teacher, in the user's environment."""
    for name, value in THEIRS.items():
        metadata = {"name": name, "namespace": namespace}
        await api.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": value}})
    teachers = [
        {"name": "big", "backend": "sglang", "model": {"source": "/data/teacher"}},
        {
            "name": "far",
            "endpoints": ["http://teacher.example:30000"],
            "apiKeySecretRef": {"name": "far", "key": "token"},
            "maxContextTokens": 8192,
        },
    ]
    hub = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    made: Job = await create_job(
        teachers=teachers,
        routing={"map": {"math": "big"}, "default": "far"},
        runtime={"env": [hub], "device": "cuda", "acceleratorResource": "nvidia.com/gpu"},
    )
    return made


class Namespace:
    """Reads what is in a namespace."""

    def __init__(self, control_plane: Any, name: str) -> None:
        self._control_plane, self._name = control_plane, name

    def get(self, *words: str) -> str:
        return str(self._control_plane.kubectl("-n", self._name, "get", *words))

    def kinds(self) -> list[str]:
        """Every kind that can be listed here, but Secrets."""
        text = self._control_plane.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name")
        return [kind for kind in text.split() if kind != "secrets"]

    def values(self) -> dict[str, str]:
        """Values of all Secrets, by `secret/key`."""
        items = json.loads(self.get("secrets", "-o", "json"))["items"]
        return {
            f"{item['metadata']['name']}/{key}": base64.b64decode(value).decode()
            for item in items
            for key, value in item["data"].items()
        }


def forms(value: str) -> Iterator[str]:
    """A value as it is, and in base64 wherever it may begin in a longer text."""
    yield value
    for shift in range(3):
        # The characters that mix with what stands before and after are left out.
        yield base64.b64encode(b"\0" * shift + value.encode())[4 if shift else 0 : -4].decode()


def leaks(values: dict[str, str], texts: dict[str, str]) -> list[str]:
    """Which value stands in which text."""
    return [
        f"{name} in {where}"
        for name, value in values.items()
        for where, text in texts.items()
        if any(form in text for form in forms(value))
    ]


def variables(node: Any) -> Iterator[Manifest]:
    """Every environment variable of a manifest."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        if key == "env" and isinstance(value, list):
            yield from value
        yield from variables(value)


def process_texts(pid: int) -> dict[str, str]:
    """Command line and environment of a process."""
    return {name: Path(f"/proc/{pid}/{name}").read_bytes().decode() for name in ("cmdline", "environ")}


async def test_no_secret_is_in_any_object_log_metric_or_command(
    start_operator: Any, job: Job, player: Player, control_plane: Any
) -> None:
    player.script.hold_at_step = 1
    operator = await start_operator(log_level="DEBUG")
    await job.reaches("Training")
    space = Namespace(control_plane, job.namespace)
    values = space.values()
    assert set(THEIRS.values()) <= set(values.values())
    made = {name: value for name, value in values.items() if value not in THEIRS.values()}
    assert {name.rpartition("/")[2] for name in made} >= {"apiKey", "adminKey"}
    assert all(len(value) >= 43 for value in made.values()), "256 bits of chance each"

    async def search(moment: str) -> None:
        kinds = space.kinds()
        assert {"opdjobs.opd.dev", "rayjobs.ray.io", "pods", "events", "configmaps"} <= set(kinds)
        texts = {f"{kind} ({moment})": space.get(kind, "-o", "yaml") for kind in kinds}
        texts |= {"log": operator.log.read_text(), "metrics": (await operator.get("/metrics"))[1]}
        texts |= process_texts(operator.process.pid)
        assert leaks(values, texts) == []
        assert leaks(values, {"secrets": space.get("secrets", "-o", "yaml")}), "the search finds what is there"

    await search("while it trains")
    pods = json.loads(space.get("pods,jobs,deployments,rayjobs", "-o", "json"))
    found = list(variables(pods))
    secretive = [entry for entry in found if SECRETIVE.search(entry["name"])]
    assert {entry["valueFrom"]["secretKeyRef"]["name"] for entry in secretive} >= {"hub", "far"}
    assert [entry["name"] for entry in found if SECRETIVE.search(entry["name"]) and "value" in entry] == []
    player.script.hold_at_step = None
    await job.reaches("Succeeded", seconds=60)
    await search("at the end")
