"""The models inside a learner rank: the student with its head, a critic, and frozen teachers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from opd_api.v1alpha1 import Dtype, Lora, Model
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer import core
from opd_trainer.errors import TrainerError
from opd_trainer.learner.batch import MicroBatch
from opd_trainer.learner.head import HeadOutput, HeadRequest, from_hidden, from_logits

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger(__name__)

DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}
#: Settings of a config that make the logits more than hidden @ weight^T.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
#: Rows on which the fused head is compared with the model's own logits.
CHECKED_ROWS = 32


class StudentWithHead(nn.Module):
    """A causal model whose head runs inside the forward pass of FSDP's root, where its weight is whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.fused = head_is_plain(model)

    def forward(self, batch: MicroBatch, request: HeadRequest | None) -> HeadOutput:
        """Flat [N] outputs at `batch.rows`. Without a request: how far the two heads are apart (`_head_gap`)."""
        if request is None:
            return self._head_gap(batch)
        if not self.fused:
            return from_logits(self._own_logits(batch), batch, request)
        return from_hidden(hidden_rows(self.model.base_model, batch), self._head_weight(), batch, request)

    def _own_logits(self, batch: MicroBatch) -> Tensor:
        """[N, V]"""
        output = self.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
        return output.logits.flatten(0, 1)[batch.rows]

    def _head_weight(self) -> Tensor:
        """[V, H]"""
        return self.model.get_output_embeddings().weight

    def _head_gap(self, batch: MicroBatch) -> HeadOutput:
        """For the first rows of one sequence: `logprobs` = |fused - own| log-probability of the label, in nats, and
        `divergence` = what rounding the model's own logits to their type may add to it.

        Few rows, because this is the one place that holds logits of a whole row of the model's own.
        """
        width = batch.input_ids.shape[1]
        sequence = batch.rows[:1] // width
        chosen = (batch.rows // width == sequence).nonzero()[:CHECKED_ROWS, 0]
        columns, labels = batch.rows[chosen] - sequence * width, batch.labels[chosen]
        inputs = {
            "input_ids": batch.input_ids[sequence],
            "position_ids": batch.position_ids[sequence],
            "use_cache": False,
        }
        hidden = self.model.base_model(**inputs).last_hidden_state[0, columns]
        fused, _ = core.linear_logprobs(hidden, self._head_weight(), labels)
        if "logits_to_keep" in inspect.signature(type(self.model).forward).parameters:
            own = self.model(**inputs, logits_to_keep=columns).logits[0]
        else:
            own = self.model(**inputs).logits[0, columns]
        own_label = core.gather_logprobs(own, labels.unsqueeze(1))[:, 0]
        # Half a unit in the last place for the label's logit, and as much for the largest in the sum.
        rounding = torch.finfo(own.dtype).eps * own.abs().amax(dim=-1).to(own_label.dtype)
        return HeadOutput((fused - own_label).abs(), rounding)


class FrozenTeacher(nn.Module):
    """A teacher inside the learner: no gradient, logits by slices of rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.plain = head_is_plain(model)

    @property
    def vocabulary(self) -> int:
        """V of the teacher."""
        return int(self.model.config.get_text_config().vocab_size)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Hidden states [N, H] where the head is plain, else logits [N, V]."""
        if self.plain:
            return hidden_rows(self.model.base_model, batch)
        output = self.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
        return output.logits.flatten(0, 1)[batch.rows]

    def logits(self, states: Tensor, part: slice) -> Tensor:
        """[n, V] at the rows of `part`; only after a forward pass, when FSDP's root holds its parameters whole."""
        if not self.plain:
            return states[part]
        return states[part] @ self.model.get_output_embeddings().weight.T


class Critic(nn.Module):
    """A value head, 0 at the start, on a language model: V of the state before each response token."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.model = backbone
        self.value = nn.Linear(backbone.config.get_text_config().hidden_size, 1)
        if not self.value.weight.is_meta:
            nn.init.zeros_(self.value.weight)
            nn.init.zeros_(self.value.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        """[N]"""
        # FSDP hangs its backward hook on the output, and asks for tensors that are no views.
        return self.value(hidden_rows(self.model, batch))[:, 0].clone()


def hidden_rows(backbone: nn.Module, batch: MicroBatch) -> Tensor:
    """Final hidden states at `batch.rows`, [N, H]."""
    output = backbone(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    return output.last_hidden_state.flatten(0, 1)[batch.rows]


def head_is_plain(model: nn.Module) -> bool:
    """Whether the logits are hidden @ weight^T, as far as the config and the type of the head tell."""
    head = model.get_output_embeddings()
    text = model.config.get_text_config()
    scaled = [name for name in _LOGIT_SETTINGS if getattr(text, name, None) not in (None, 1, 1.0)]
    return type(head) is nn.Linear and head.bias is None and not scaled


# --- loading --------------------------------------------------------------------------------------------------------
def student_builder(model: Model, lora: Lora | None, *, seed: int, attention: str) -> Callable[[bool], StudentWithHead]:
    """A function that makes the student: with its weights in fp32 on the CPU (True), or without storage (False)."""

    def build(real: bool) -> StudentWithHead:
        plain = _causal(model, torch.float32, real, attention)
        if lora is not None:
            # The same adapters on every rank would need the same generator state; only rank 0's are kept anyway.
            torch.manual_seed(seed)
            _add_adapters(plain, lora, real)
        return StudentWithHead(_without_dropout(plain))

    return build


def teacher_builder(model: Model, *, attention: str) -> Callable[[bool], FrozenTeacher]:
    """As `student_builder`, for a frozen teacher in its own dtype."""
    return lambda real: FrozenTeacher(_without_dropout(_causal(model, DTYPES[model.dtype], real, attention)))


def critic_builder(model: Model, *, attention: str) -> Callable[[bool], Critic]:
    """As `student_builder`, for a critic."""

    def build(real: bool) -> Critic:
        if real:
            return Critic(_without_dropout(_load(AutoModel, model, torch.float32, attention)))
        with init_empty_weights(include_buffers=False):
            return Critic(_without_dropout(_skeleton(AutoModel, model, torch.float32, attention)))

    return build


def lora_config(lora: Lora) -> LoraConfig:
    """The adapters as peft knows them; without names every linear layer but the head."""
    # Importing peft takes seconds, which full fine-tuning must not pay in every rank.
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=list(lora.target_modules) or "all-linear",
        task_type="CAUSAL_LM",
    )


def _add_adapters(model: nn.Module, lora: Lora, real: bool) -> None:
    from peft import inject_adapter_in_model

    try:
        if real:
            inject_adapter_in_model(lora_config(lora), model)
        else:
            with init_empty_weights(include_buffers=False):
                inject_adapter_in_model(lora_config(lora), model)
    except ValueError as error:
        raise TrainerError(
            FailureClass.CONFIG, Reason.CONFIG_ERROR, f"student.lora cannot be applied: {error}"
        ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _causal(model: Model, dtype: torch.dtype, real: bool, attention: str) -> nn.Module:
    if real:
        return _load(AutoModelForCausalLM, model, dtype, attention)
    return _skeleton(AutoModelForCausalLM, model, dtype, attention)


def _load(auto: Any, model: Model, dtype: torch.dtype, attention: str) -> nn.Module:
    try:
        loaded = auto.from_pretrained(
            model.source,
            revision=model.revision,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=model.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise _not_found(model, error) from error
    # A few checkpoints load single tensors (routers, norms) in another type than asked for.
    return loaded.to(dtype)


def _skeleton(auto: Any, model: Model, dtype: torch.dtype, attention: str) -> nn.Module:
    """The modules with parameters on the meta device and real buffers (rotary frequencies are computed, not loaded)."""
    try:
        config = AutoConfig.from_pretrained(
            model.source, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _not_found(model, error) from error
    trusted: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    if model.trust_remote_code and auto.__name__ in getattr(config, "auto_map", {}):
        trusted["code_revision"] = model.revision  # else the code of the hub's main, which is not on the claim
    with init_empty_weights(include_buffers=False):
        made = auto.from_config(config, dtype=dtype, attn_implementation=attention, **trusted).to(dtype)
    made.tie_weights()
    return made


def _not_found(model: Model, error: Exception) -> TrainerError:
    return TrainerError(
        FailureClass.CONFIG,
        Reason.MODEL_NOT_FOUND,
        f"the model {model.source} cannot be loaded: {str(error).splitlines()[0]}; check source, revision and trustRemoteCode",
    )


def _without_dropout(model: nn.Module) -> nn.Module:
    """Log-probabilities must be those of the policy that samples: no dropout anywhere."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model
