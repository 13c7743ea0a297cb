"""Small samples, configurations and misbehaviours for tests of the teacher pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from opd_api.trainer_config import TrainerConfig
from opd_testing.configs import trainer_config
from opd_testing.fake_teacher import right_answer
from opd_trainer.sample import Sample
from opd_trainer.teachers.pool import TeacherPool

PROMPT = [5, 6, 7]
RESPONSE = [8, 9]


def sample(group: int = 1, response: list[int] | None = None, source: str = "") -> Sample:
    ids = np.array(RESPONSE if response is None else response, np.int32)
    return Sample(1, group, source, np.array(PROMPT, np.int32), response_ids=ids)


def config_for(root: Path, urls: list[str], *, timeout: int = 20, retries: int = 2, **more: Any) -> TrainerConfig:
    teacher = {
        "name": "teacher",
        "backend": "sglang",
        "endpoints": urls,
        "requestTimeoutSeconds": timeout,
        "maxRetries": retries,
        **more.pop("teacher", {}),
    }
    return trainer_config(root, urls={"teacher": urls}, teachers=[teacher], **more)


@contextlib.asynccontextmanager
async def pool_of(config: TrainerConfig, **options: Any) -> AsyncIterator[TeacherPool]:
    pool = TeacherPool(config, **options)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def once(fault: Callable[[web.Request], Any], times: int = 1) -> Any:
    """Misbehave a number of times, then answer rightly."""
    left = [times]

    def behave(request: web.Request, body: dict[str, Any]) -> Any:
        if left[0] > 0:
            left[0] -= 1
            return fault(request)
        return right_answer(body)

    return behave


def status(code: int) -> Callable[[web.Request], web.Response]:
    return lambda _: web.Response(status=code, text=f"says {code}")


def reset(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
