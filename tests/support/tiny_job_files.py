"""Tiny models and prompts for whole runs: `tiny_job_files.py DIR` (trainer environment).

DIR/{teacher,teacher2,student} share one tokenizer; DIR/other has another vocabulary. DIR/prompts.jsonl has two data sources.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from opd_testing.tiny_models import write_model, write_tokenizer

PROMPTS = 48


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(("teacher", "student", "teacher2"), start=1):
        write_model(directory / name, seed=seed, family="qwen2", hidden=64, tied=False, scale=2.0)
    write_model(directory / "other", seed=4, family="qwen2", vocabulary=264, tokenizer=False)
    write_tokenizer(directory / "other", extra=[f"<extra{index}>" for index in range(5)])
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{index} + {index % 7} = ?"}],
            "data_source": "even" if index % 2 == 0 else "odd",
            "answer": str(index + index % 7),
        }
        for index in range(PROMPTS)
    ]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for item in (directory, *directory.rglob("*")):
        item.chmod(0o755 if item.is_dir() else 0o644)


if __name__ == "__main__":
    main()
