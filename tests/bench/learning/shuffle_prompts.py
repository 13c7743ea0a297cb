"""`shuffle_prompts.py DATA`: the quickstart's training prompts in one fixed order, without long ones (trainer environment)."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from recipe import PROMPT_TOKENS, SEED, Folders
from transformers import AutoTokenizer


def main() -> None:
    folders = Folders(Path(sys.argv[1]))
    tokenizer = AutoTokenizer.from_pretrained(folders.teacher)
    records = [json.loads(line) for line in (folders.data / "prompts/prompts.jsonl").read_text().splitlines()]
    short = [
        record
        for record in records
        if len(tokenizer.apply_chat_template(record["prompt"], add_generation_prompt=True, return_dict=False))
        <= PROMPT_TOKENS
    ]
    random.Random(SEED).shuffle(short)
    folders.prompts.write_text("".join(json.dumps(record) + "\n" for record in short))
    print(f"{len(short)} of {len(records)} prompts have at most {PROMPT_TOKENS} tokens")


if __name__ == "__main__":
    main()
