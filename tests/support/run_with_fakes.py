"""`opd-trainer run` with in-memory parts: `run_with_fakes.py CONFIG [run options]`. Latencies in real seconds."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from controller_fakes import FakeEngine, FakeLearner, FakeScorer, FakeStore, RecordingLog, encode_text

from opd_api.trainer_config import TrainerConfig
from opd_trainer import runner
from opd_trainer.build import Built
from opd_trainer.cli import main
from opd_trainer.controller import Parts
from opd_trainer.controller.state import RunState
from opd_trainer.metrics import PrometheusMetrics
from opd_trainer.ray_runtime import start_ray
from opd_trainer.rollout.data import PromptStream, load_records
from opd_trainer.storage import RunDirectory


def newest_checkpoint(directory: RunDirectory) -> tuple[Path, dict[str, Any]] | None:
    """The fakes' folders have no manifest; the newest of the highest attempt counts."""
    folders = list(directory.checkpoints.glob("step-*.a*"))
    if not folders:
        return None

    def order(path: Path) -> tuple[int, int]:
        step, attempt = path.name.removeprefix("step-").split(".a")
        return int(attempt), int(step)

    path = max(folders, key=order)
    return path, json.loads((path / "controller.json").read_text())


async def build_parts(
    config: TrainerConfig, directory: RunDirectory, state: RunState, prometheus: PrometheusMetrics
) -> Built:
    directory.create()
    if "FAKE_WITH_RAY" in os.environ:
        await asyncio.to_thread(start_ray, config)
    records = load_records(config.data.source, config.data.split)
    found = newest_checkpoint(directory)
    store = FakeStore(directory.checkpoints, config.run.attempt)
    rollout, train = (float(os.environ.get(name, "0")) for name in ("FAKE_ROLLOUT_SECONDS", "FAKE_TRAIN_SECONDS"))
    parts = Parts(
        engine=FakeEngine(latency=lambda call: rollout),
        scorer=FakeScorer(),
        learner=FakeLearner(seconds=train),
        store=store,
        stream=PromptStream(records, encode_text, config.data),
        log=RecordingLog(),
        total_steps=config.training.steps or 1,
        resume_from=found[0] if found else None,
        resume_state=found[1] if found else None,
    )
    return Built(parts, [])


runner.build_parts = build_parts  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(main(["run", "--config", *sys.argv[1:]]))
