"""Random models of a few thousand parameters with a byte-level tokenizer, made in a second, without a network."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

SPECIAL = ["<pad>", "<eos>", "<bos>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tokenizer(folder: Path, *, extra: list[str] | None = None, eos: str = "<eos>") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: 3 special tokens, 256 bytes and `extra` ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet, *(extra or [])])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=eos, bos_token="<bos>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    return fast


def write_model(
    folder: Path,
    *,
    seed: int = 0,
    family: str = "llama",
    vocabulary: int = 259,
    hidden: int = 32,
    layers: int = 2,
    context: int = 512,
    tied: bool = True,
    scale: float = 1.0,
    tokenizer: bool = True,
) -> Path:
    """A random causal model as a Hugging Face folder. `scale` > 1 sharpens its distributions."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "initializer_range": 0.1 * scale,
    }
    config = Qwen2Config(**common) if family == "qwen2" else LlamaConfig(**common)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, bos_token_id=2)
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def direct_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [L - 1, V] of a plain fp32 forward: row i predicts token i + 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), -1)[:-1]
