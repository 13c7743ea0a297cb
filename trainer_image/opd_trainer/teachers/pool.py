"""All teachers behind one door: `interfaces.Scorer`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from opd_api.trainer_config import TeacherAddress, TrainerConfig, TrainerTeacher
from opd_api.v1alpha1 import RoutingMode, TeacherBackend, TokenSelection
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure, SampleError, TrainerError
from opd_trainer.sample import Sample
from opd_trainer.teachers.client import Listener, TeacherClient
from opd_trainer.teachers.facts import learn_facts, vocabulary_of
from opd_trainer.teachers.routing import Router
from opd_trainer.teachers.selection import mix, query_for, selected_tokens, without_foreign
from opd_trainer.teachers.wire import ScoreAnswer


class TeacherPool:
    """Routing, ensembles and token selection over the clients. In-process teachers score in the learner, not here."""

    def __init__(
        self, config: TrainerConfig, *, environ: Mapping[str, str] | None = None, listener: Listener | None = None
    ) -> None:
        environ = os.environ if environ is None else environ
        self._selection = config.distillation.token_selection
        self._top_k = config.distillation.top_k or 0
        self._router = Router(config.routing, [teacher.name for teacher in config.teachers])
        self._teachers = {teacher.name: teacher for teacher in config.teachers}
        addresses = {address.name: address for address in config.run.teachers}
        self._clients = {
            teacher.name: self._client(config, teacher, addresses.get(teacher.name), environ, listener)
            for teacher in config.teachers
            if teacher.backend is not TeacherBackend.INPROCESS
        }
        served_ensemble = config.routing.mode is RoutingMode.ENSEMBLE and bool(self._clients)
        if served_ensemble and self._selection not in (TokenSelection.STUDENT_SAMPLED, TokenSelection.STUDENT_TOPK):
            raise TrainerError(
                FailureClass.CONFIG,
                Reason.CONFIG_ERROR,
                f"an ensemble cannot select {self._selection}: the teachers' own top tokens differ. Use student_topk",
            )

    @staticmethod
    def _client(
        config: TrainerConfig,
        teacher: TrainerTeacher,
        address: TeacherAddress | None,
        environ: Mapping[str, str],
        listener: Listener | None,
    ) -> TeacherClient:
        if address is None or not address.urls:
            raise TrainerError(
                FailureClass.CONFIG, Reason.CONFIG_ERROR, f"no address for teacher {teacher.name}", teacher=teacher.name
            )
        key = environ.get(address.api_key_env) if address.api_key_env else None
        if address.api_key_env and not key:
            raise TrainerError(
                FailureClass.CONFIG,
                Reason.CONFIG_ERROR,
                f"the environment variable {address.api_key_env} with the API key of {teacher.name} is not set",
                teacher=teacher.name,
            )
        return TeacherClient(
            teacher,
            address,
            api_key=key,
            ready_deadline=float(config.lifecycle.teacher_ready_deadline_seconds),
            vocabulary=vocabulary_of(config, teacher),
            listener=listener,
        )

    @property
    def clients(self) -> dict[str, TeacherClient]:
        """The teachers that are servers, by name."""
        return self._clients

    async def start(self) -> None:
        """Open sessions, resolve names, ask the servers for their limits."""
        await asyncio.gather(*(client.start() for client in self._clients.values()))
        await asyncio.gather(*(learn_facts(client) for client in self._clients.values()))

    async def stop(self) -> None:
        """Close sessions; idempotent."""
        await asyncio.gather(*(client.stop() for client in self._clients.values()))

    @property
    def unavailable(self) -> str | None:
        """Teacher that samples wait for, or None."""
        return next((name for name, client in self._clients.items() if client.unavailable), None)

    async def score(self, sample: Sample) -> None:
        """Fill `teacher`, `teacher_logprobs` and (set selections) `selected`. Raises SampleError or TrainerError."""
        if not len(sample.prompt_ids) or not sample.response_length:
            raise SampleError(Failure(FailureClass.DATA, Reason.DATA_ERROR, "the prompt or the response is empty"))
        names = self._router.route(sample)
        sample.teacher = "+".join(names)
        if any(name not in self._clients for name in names):
            return  # the learner owns the in-process teacher and fills in the rest
        answers = await self._ask(sample, names)
        answer = answers[0] if len(answers) == 1 else mix(answers, [self._teachers[name].weight for name in names])
        sample.teacher_logprobs = answer.sampled
        sample.selected = selected_tokens(self._selection, answer, sample.student_topk)

    async def _ask(self, sample: Sample, names: list[str]) -> list[ScoreAnswer]:
        tasks = [asyncio.create_task(self._ask_one(sample, name)) for name in names]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _ask_one(self, sample: Sample, name: str) -> ScoreAnswer:
        client = self._clients[name]
        query = query_for(
            sample,
            self._selection,
            self._top_k,
            reuse_prefix=self._teachers[name].prefix_caching,
            vocabulary=client.facts.vocabulary,
        )
        return without_foreign(await client.score(query, sample.group_id), sample, client.facts.vocabulary)
