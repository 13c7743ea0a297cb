"""`opd-trainer probe` as a process: nothing has been imported before it starts."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from opd_testing.configs import trainer_config
from opd_testing.fake_teacher import fake_teachers
from opd_testing.tiny_models import write_model


async def test_several_teachers_are_probed_by_a_process_that_has_loaded_nothing_yet(tmp_path: Path) -> None:
    student = write_model(tmp_path / "student", seed=1)
    rows = [{"prompt": f"What is {n} plus {n}?", "from": "even"} for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with fake_teachers(4) as teachers:
        urls = {f"teacher-{index}": [teacher.url] for index, teacher in enumerate(teachers)}
        entries = [{"name": name, "backend": "sglang", "endpoints": addresses} for name, addresses in urls.items()]
        config = trainer_config(
            tmp_path,
            urls=urls,
            teachers=entries,
            student=str(student),
            data={"dataSourceField": "from"},
            routing={"map": {"even": "teacher-0"}},
        )
        (tmp_path / "job.json").write_text(config.to_json())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "opd_trainer.cli", "probe", "--config", str(tmp_path / "job.json")),
            *("--termination-log", str(tmp_path / "log")),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(180):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, output.decode()
        asked = [{tuple(body["input_ids"]) for body in teacher.bodies} for teacher in teachers]
    assert len(asked[0]) > 1
    assert all(one == asked[0] for one in asked)
