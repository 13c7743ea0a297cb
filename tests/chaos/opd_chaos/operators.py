"""Starts operators and ends them as the schedule says, one after another: as tasks of this process, or as processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import yaml
from kubernetes.aio.client.configuration import Configuration
from operator_api import Api
from operator_jobs import free_port

from opd_chaos.clock import Clock
from opd_chaos.proxy import CALL_SECONDS, Proxy
from opd_chaos.schedule import Death, Mood, Round
from opd_operator.cluster import Cluster
from opd_operator.errors import Unreachable
from opd_operator.main import Operator
from opd_operator.metrics import Metrics
from opd_operator.settings import Settings

START = "from opd_operator.main import main; main()"
#: Added to the grace before a new attempt starts though old pods are there; see invariants.
OLD_PODS_EXTRA_SECONDS = 5.0

#: Fewer than lives: a worker that hangs is missed.
WORKERS = 4


def settings(namespace: str, identity: str, election: bool) -> dict[str, Any]:
    """What an operator of a round is told: short back-offs, everything else as shipped."""
    return {
        "watch_namespaces": (namespace,),
        "leader_election": election,
        "lease_namespace": namespace,
        "identity": identity,
        "http_port": free_port(),
        "api_timeout_seconds": CALL_SECONDS,
        "retry_backoff_seconds": 1.0,
        "retry_backoff_max_seconds": 2.0,
        "capacity_backoff_min_seconds": 1.0,
        "capacity_backoff_max_seconds": 3.0,
        "old_pods_extra_seconds": OLD_PODS_EXTRA_SECONDS,
        "training_status_seconds": 1.0,
        "workers": WORKERS,
        "resync_seconds": 60.0,
    }


class Body(Protocol):
    """One running operator."""

    async def crash(self) -> None:
        """The end without a goodbye."""
        ...

    async def stop(self) -> None:
        """The end as a kubelet asks for it."""
        ...

    def fault(self) -> str:
        """Why it ended by itself, if it did."""
        ...

    def passes(self) -> str:
        """How its passes ended, where that is known."""
        ...


class TaskBody:
    """An operator as a task."""

    def __init__(self, url: str, told: dict[str, Any]) -> None:
        configuration = Configuration()
        configuration.host = url
        self._metrics = metrics = Metrics()
        self._cluster = Cluster(configuration, observer=metrics, timeout_seconds=told["api_timeout_seconds"])
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(Operator(Settings(**told), self._cluster, metrics).run(self._stop))

    async def crash(self) -> None:
        self._task.cancel()
        await self._bury()

    async def stop(self) -> None:
        self._stop.set()
        await self._bury()

    async def _bury(self) -> None:
        with contextlib.suppress(asyncio.CancelledError, Unreachable):
            await self._task
        await self._cluster.close()

    def fault(self) -> str:
        return repr(self._task) if self._task.done() else ""

    def passes(self) -> str:
        lines = self._metrics.render().decode().splitlines()
        return ", ".join(line for line in lines if line.startswith("opd_operator_reconcile_seconds_count"))


class ProcessBody:
    """An operator as a process."""

    def __init__(self, url: str, told: dict[str, Any], folder: Path) -> None:
        name = str(told["identity"])
        cluster = {"name": "c", "cluster": {"server": url}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        user = {"name": "u", "user": {"token": "none"}}
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "users": [user]}
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config | {"current-context": "c"}))
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
        environment["KUBECONFIG"] = str(file)
        for key, value in told.items():
            environment[f"OPD_OPERATOR_{key.upper()}"] = ",".join(value) if isinstance(value, tuple) else str(value)
        self._log = folder / f"{name}.log"
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen([sys.executable, "-c", START], env=environment, stdout=sink, stderr=sink)

    async def crash(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait, 10)

    async def stop(self) -> None:
        self._process.terminate()
        await asyncio.to_thread(self._process.wait, 20)

    def fault(self) -> str:
        return self._log.read_text()[-2000:] if self._process.poll() is not None else ""

    def passes(self) -> str:
        return ""


class Replica:
    """The operators of one replica, one after another; the last one lives until `end`."""

    def __init__(
        self,
        api: Api,
        session: aiohttp.ClientSession,
        clock: Clock,
        namespace: str,
        plan: Round,
        number: int,
        folder: Path,
    ) -> None:
        self._api, self._session, self._clock, self._namespace, self._plan = api, session, clock, namespace, plan
        self._number, self._folder = number, folder
        self._funerals: list[asyncio.Task[None]] = []
        self._body: Body | None = None
        self._proxy: Proxy | None = None
        #: (start, end) of each operator in seconds of the clock.
        self.lives: list[tuple[float, float]] = []
        self.faults: Counter[str] = Counter()
        self.calls = 0
        self.kills = 0
        self.broken: list[str] = []
        #: One line for each operator, for the file of a broken round.
        self.notes: list[str] = []

    async def run(self) -> None:
        """Lives through all deaths of the schedule, and then on for ever."""
        for number, death in enumerate(self._plan.deaths[self._number]):
            await self._live(number, self._plan.mood, death)
            await asyncio.sleep(death.pause)
        await self._live(len(self._plan.deaths[self._number]), self._plan.mood, None)

    async def _live(self, number: int, mood: Mood, death: Death | None) -> None:
        dice = random.Random(f"{self._plan.seed}/{self._number}/{number}")
        proxy = self._proxy = Proxy(self._api, self._session, mood, dice)
        time_to_die = asyncio.Event()
        if death is not None and death.manner == "crash":
            proxy.carried_out, proxy.late = death.carried_out, death.late

            def fatal(writes: int) -> bool:
                if writes >= death.writes:
                    time_to_die.set()
                return writes >= death.writes

            proxy.fatal = fatal
        await proxy.start()
        identity = f"{self._namespace}-{self._number}-{number}"
        told = settings(self._namespace, identity, len(self._plan.deaths) > 1)
        started = self._clock.seconds
        self.lives.append((started, float("inf")))
        body: Body = ProcessBody(proxy.url, told, self._folder) if self._plan.processes else TaskBody(proxy.url, told)
        self._body = body
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(death.seconds if death is not None else None):
                await time_to_die.wait()
        self.lives[-1] = (started, self._clock.seconds)
        await self._die(death.manner if death else "crash")

    async def _die(self, manner: str) -> None:
        body, proxy = self._body, self._proxy
        self._body = self._proxy = None
        if body is None or proxy is None:
            return
        if why := body.fault():
            self.broken.append(why)
        begin, end = self.lives[-1]
        self.notes.append(
            f"replica {self._number}: {begin:.1f} to {end:.1f} ({manner}), {proxy.calls} calls, {proxy.writes} writes, "
            f"faults {dict(proxy.faults)}; {body.passes()}"
        )
        if manner == "stop":
            await body.stop()
            await proxy.cut()
        else:
            # Cut off first: from now on nothing of it reaches the API server, as if it had been killed.
            if self._plan.processes:
                self.kills += 1
                await body.crash()
            await proxy.cut()
            self._funerals.append(asyncio.create_task(self._bury(body, proxy)))
        self.faults += proxy.faults
        self.calls += proxy.calls

    async def _bury(self, body: Body, proxy: Proxy) -> None:
        if not self._plan.processes:
            await body.crash()
        await proxy.settle()

    async def end(self) -> None:
        """Ends what still lives, and waits for everything that was on its way."""
        if self.lives:
            self.lives[-1] = (self.lives[-1][0], min(self.lives[-1][1], self._clock.seconds))
        await self._die("stop")
        await asyncio.gather(*self._funerals)


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for kubeconfigs and logs."""
    return tempfile.TemporaryDirectory(prefix="opd-chaos-")
