"""The sequences that a probe scores: real prompts of the job, cut in two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from opd_api.trainer_config import TrainerConfig
from opd_trainer.build import load_tokenizer
from opd_trainer.errors import TrainerError
from opd_trainer.rollout.data import PromptEncoder, PromptStream, load_records
from opd_trainer.teachers.selection import NEEDS_STUDENT_TOP, NEEDS_TEACHER_TOP
from opd_trainer.teachers.wire import ScoreQuery

#: Fills up prompts that are too short to say anything, and stands in where the data cannot be read here.
FILLER = (
    "A teacher reads what the student wrote and says, token by token, how likely it would have written the same. "
    "The student then moves a little towards the teacher: 3 + 4 = 7, and 7 × 6 = 42."
)
MIN_TOKENS = 32


#: Token ids of the prompts that every teacher of a job is probed with, each [at least MIN_TOKENS].
Sequences = Sequence[NDArray[np.int32]]


def probe_queries(config: TrainerConfig, sequences: Sequences, vocabulary: int | None) -> list[ScoreQuery]:
    """One query per sequence that asks for what the job's token selection will ask for."""
    limit = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return [_query(config, ids[:limit], vocabulary) for ids in sequences]


def full_length_query(config: TrainerConfig, sequences: Sequences, vocabulary: int | None) -> ScoreQuery:
    """One sequence of the greatest length that the job can produce; only the sampled tokens are asked for."""
    length = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    ids = np.resize(sequences[0], length)
    split = config.data.max_prompt_tokens
    return ScoreQuery(ids[:split], ids[split:], vocabulary=vocabulary)


def _query(config: TrainerConfig, ids: NDArray[np.int32], vocabulary: int | None) -> ScoreQuery:
    split = max(1, len(ids) // 2)
    response = ids[split:]
    selection, top_k = config.distillation.token_selection, config.distillation.top_k or 0
    at_ids = None
    if selection in NEEDS_STUDENT_TOP:
        # Any ids do: neighbours of the response's own, which every vocabulary has.
        known = vocabulary or int(ids.max()) + 1
        at_ids = ((response[:, None].astype(np.int64) + np.arange(top_k)) % known).astype(np.int32)
    return ScoreQuery(
        ids[:split],
        response,
        top_k if selection in NEEDS_TEACHER_TOP else 0,
        at_ids,
        vocabulary=vocabulary,
    )


def read_sequences(config: TrainerConfig) -> list[NDArray[np.int32]]:
    """The first `preflight.samples` prompts of the job.

    Read once for all teachers, by one thread: `transformers` puts another module in its own place while it is imported,
    so a second thread that imports it meanwhile is left with the half that has no tokenizers.

    Raises:
        TrainerError: Config/ModelNotFound, the student's tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(config)
    encode = PromptEncoder(tokenizer, config.data.chat_template)
    filler = PromptEncoder(tokenizer, None)(FILLER)[0]
    prompts: list[NDArray[np.int32]] = []
    try:
        data = config.data.model_copy(update={"shuffle": False})
        stream = PromptStream(load_records(data.source, data.split), encode, data)
        rows = (stream.encode(row) for row in range(stream.size))
        for prompt in rows:
            if prompt is not None:
                prompts.append(prompt.ids)
            if len(prompts) == config.preflight.samples:
                break
    except TrainerError:
        # The input check has said what is wrong with the data; the teacher can be probed without it.
        prompts = []
    while len(prompts) < config.preflight.samples:
        prompts.append(np.roll(filler, len(prompts)))
    return [ids if len(ids) >= MIN_TOKENS else np.concatenate([ids, filler])[: 2 * MIN_TOKENS] for ids in prompts]
