"""The way to the API server breaks, by refusal and by silence. Only the operator's own way: the cluster goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from operator_api import Api
from operator_jobs import eventually
from operator_player import Player
from wire import Wire


@pytest.fixture
async def wire(control_plane: Any, operator_kubeconfig: Path) -> AsyncIterator[Wire]:
    """Operators of the test reach the API server through it (the certificate names the loopback too)."""
    address = urlsplit(control_plane.server)
    assert address.hostname is not None
    assert address.port is not None
    async with Wire(address.hostname, address.port).relaying() as relay:
        config = yaml.safe_load(operator_kubeconfig.read_text())
        for entry in config["clusters"]:
            entry["cluster"]["server"] = f"https://127.0.0.1:{relay.port}"
        operator_kubeconfig.write_text(yaml.safe_dump(config))
        yield relay


async def test_what_happened_while_the_way_was_cut_is_dealt_with_afterwards(
    wire: Wire, start_operator: Any, create_job: Any, player: Player, api: Api
) -> None:
    player.script.hold_at_step = 2
    operator = await start_operator()
    job = await create_job()
    await job.reaches("Training")
    wire.cut()

    async def not_leading() -> bool:
        return not await operator.leads()

    (head,) = await api.list("v1", "Pod", job.namespace, "opd.dev/role=head")
    await api.delete(head, grace_seconds=0)
    await eventually("it stops to lead, for it cannot renew", not_leading, seconds=30)
    assert operator.process.poll() is None, "an outage is no reason to end"
    assert (await operator.get("/readyz"))[0] == 200
    wire.mend()

    async def second_attempt() -> bool:
        return (await job.status()).get("attempt") == 2

    await eventually("attempt 2", second_attempt, seconds=60, state=job.status)
    player.script.hold_at_step = None
    await job.reaches("Succeeded", seconds=60)
    assert [what for what, _ in player.log].count("rayjob seen") == 2


async def test_silent_watches_are_noticed_told_and_replaced(
    wire: Wire, start_operator: Any, create_job: Any, player: Player
) -> None:
    operator = await start_operator(watch_stale_seconds="20", api_timeout_seconds="5")
    assert (await operator.get("/healthz"))[0] == 200
    wire.freeze()

    async def unhealthy() -> bool:
        code, words = await operator.get("/healthz")
        return code == 503 and "silent" in words

    await eventually("/healthz complains", unhealthy, seconds=45)
    assert (
        await operator.metric("opd_operator_watch_age_seconds", kind="pods") > 15
    )  # the probe gave up at 20; a watch may have reopened since
    wire.mend()

    async def healthy() -> bool:
        return (await operator.get("/healthz"))[0] == 200

    await eventually("/healthz is content again", healthy, seconds=90)
    job = await create_job()
    await job.reaches("Succeeded", seconds=60)
