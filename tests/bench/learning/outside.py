"""Reverse KL from outside both trainers, in plain torch.

`outside.py '{"students": …, "teacher": …, "prompts": …, "held_out": …, "answer_tokens": …, "out": …}'`:
KL(student ‖ teacher) over the full vocabulary, in nats a token, on answers that the student samples to the first `held_out` prompts.
Writes as JSON for each student, by its name: the mean, its standard error over the prompts, and the mean answer length.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from recipe import SEED
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def measure(
    student: Any, teacher: Any, tokenizer: Any, conversations: list[Any], answer_tokens: int
) -> dict[str, float]:
    """The student's mean reverse KL on its own answers, one answer to each conversation."""
    torch.manual_seed(SEED)
    tokenizer.padding_side = "left"
    texts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in conversations]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    width = prompts.input_ids.shape[1]
    with torch.inference_mode():
        ids = student.generate(
            **prompts,
            max_new_tokens=answer_tokens,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            pad_token_id=tokenizer.pad_token_id,
        )
        answer = ids[:, width:]
        ends = torch.isin(answer, torch.tensor(_ends(student)))
        alive = (ends.cumsum(1) - ends.int()) == 0  # the end token itself counts
        mask = torch.cat([prompts.attention_mask, alive.to(prompts.attention_mask)], dim=1)
        divergence = _divergence(student, teacher, ids, mask, width)
    per_prompt = (divergence * alive).sum(1) / alive.sum(1)
    total = float((divergence * alive).sum() / alive.sum())
    spread = float(per_prompt.std() / len(per_prompt) ** 0.5)
    return {"reverse_kl": total, "standard_error": spread, "length": float(alive.sum(1).double().mean())}


def _divergence(student: Any, teacher: Any, ids: Tensor, mask: Tensor, width: int) -> Tensor:
    """[B, T] of KL at the positions that predict the answer."""
    options = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp_(min=0),
        "use_cache": False,
        "logits_to_keep": ids.shape[1] - width + 1,
    }
    s = student(**options).logits[:, :-1].log_softmax(-1)
    t = teacher(**options).logits[:, :-1].log_softmax(-1)
    return (s.exp() * (s - t)).sum(-1).double()


def _ends(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends)


def main() -> None:
    options = json.loads(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(options["teacher"])
    teacher = AutoModelForCausalLM.from_pretrained(options["teacher"], dtype=torch.float32).eval()
    lines = Path(options["prompts"]).read_text().splitlines()[: options["held_out"]]
    conversations = [json.loads(line)["prompt"] for line in lines]
    measured = {}
    for name, folder in options["students"].items():
        student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        measured[name] = measure(student, teacher, tokenizer, conversations, options["answer_tokens"])
        print(f"{name}: {measured[name]['reverse_kl']:.4f}", flush=True)
    Path(options["out"]).write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
