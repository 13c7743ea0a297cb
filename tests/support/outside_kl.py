"""Reverse KL of two models from outside the product: `outside_kl.py STUDENT TEACHER PROMPTS` prints nats per token.

Full vocabulary, plain transformers forward, on answers that the student itself samples (trainer environment).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ANSWER_TOKENS = 16
PROMPTS = 16


def main() -> None:
    student_path, teacher_path, prompts = sys.argv[1:4]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(student_path)
    student = AutoModelForCausalLM.from_pretrained(student_path, dtype=torch.float32).eval()
    teacher = AutoModelForCausalLM.from_pretrained(teacher_path, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for line in Path(prompts).read_text().splitlines()[:PROMPTS]:
        text = tokenizer.apply_chat_template(json.loads(line)["prompt"], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.inference_mode():
            answer = student.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=ANSWER_TOKENS,
                do_sample=True,
                top_k=0,
                top_p=1.0,
            )
            rows = slice(ids.shape[1] - 1, answer.shape[1] - 1)
            s = student(answer).logits[0, rows].log_softmax(-1)
            t = teacher(answer).logits[0, rows].log_softmax(-1)
        total += float((s.exp() * (s - t)).sum())
        count += s.shape[0]
    print(total / count)


if __name__ == "__main__":
    main()
