"""A template nested deeper than Python decodes by default must not take the operator from everybody else's jobs."""

from __future__ import annotations

import json
from typing import Any

from operator_jobs import document

LEVELS = 5_000
HOLE = '"HOLE"'


async def test_a_job_nested_without_end_is_refused_and_harms_no_other(
    control_plane: Any, namespace: str, create_job: Any, start_operator: Any
) -> None:
    deep = json.dumps(document(namespace, "deep", ray={"head": {"template": {"a": "HOLE"}}}))
    control_plane.kubectl("create", "-f", "-", input_text=deep.replace(HOLE, '{"a":' * LEVELS + "{}" + "}" * LEVELS))
    other = await create_job("other")
    await start_operator()
    await other.reaches("Checking")
    control_plane.kubectl("wait", "-n", namespace, "--for=condition=Failed", "opdjob/deep", "--timeout=30s")
