"""The prompts: an infinite deterministic stream over a finite file.

Position p of the stream is row permutation(seed, p // size)[p % size]. A position is called a ticket; the state of the
stream is a cursor and the tickets that must be issued again, so a resume is exact whatever was in flight.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from opd_api.v1alpha1 import Data, Overlong
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.rollout.nesting import MOST_LEVELS, too_deep

logger = logging.getLogger(__name__)
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet"}
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as issued: `ticket` is its position in the stream."""

    ticket: int
    ids: NDArray[np.int32]  # [P]
    text: str
    data_source: str
    answer: Any
    record: dict[str, Any]


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    chat_template: Any

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def data_error(reason: Reason, message: str) -> TrainerError:
    """A fault of the data: the run ends with exit code 65."""
    return TrainerError(FailureClass.DATA, reason, message)


def load_records(source: str, split: str, *, field: str = "data.source") -> Sequence[dict[str, Any]]:
    """Rows of a jsonl or parquet file, or of a hub data set (`datasets.Dataset`, memory-mapped). `field` of the spec names it.

    Raises TrainerError(Data, DataNotFound | DataError).
    """
    import datasets

    path = Path(source)
    file_format = FILE_FORMATS.get(path.suffix.lower())
    local = path.is_absolute() or source.startswith(".") or path.exists() or file_format is not None
    if local and not path.exists():
        raise data_error(Reason.DATA_NOT_FOUND, f"{field} {source} does not exist where the trainer runs")
    if local and file_format is None:
        raise data_error(
            Reason.DATA_ERROR, f"{field} {source} has no known ending; use one of {', '.join(sorted(FILE_FORMATS))}"
        )
    if path.is_file() and not path.stat().st_size:
        raise data_error(Reason.DATA_ERROR, f"{field} {source} has no rows")
    if path.is_file() and file_format == "json" and (row := too_deep(path)) is not None:
        raise data_error(
            Reason.DATA_ERROR,
            f"{field} {source}: row {row} is nested deeper than {MOST_LEVELS} levels, which Arrow cannot hold; flatten it",
        )
    datasets.disable_progress_bars()
    try:
        if local:
            rows = datasets.load_dataset(str(file_format), data_files=str(path), split="train")
        else:
            rows = datasets.load_dataset(source, split=split)
    except Exception as error:
        reason = Reason.DATA_ERROR if local else Reason.DATA_NOT_FOUND
        raise data_error(reason, f"{field} {source} (split {split}) cannot be read: {_why(error)}") from error
    if len(rows) == 0:
        raise data_error(Reason.DATA_ERROR, f"{field} {source} has no rows")
    return cast("Sequence[dict[str, Any]]", rows)


def _why(error: BaseException) -> str:
    """The first words in the chain of causes: `datasets` says only that something failed, and pyarrow what and in which row."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def row_at(records: Sequence[dict[str, Any]], row: int) -> dict[str, Any]:
    """A row, counted from 0. Raises TrainerError(DataError) for text that is not UTF-8, which shows only when it is read."""
    try:
        return dict(records[row])
    except UnicodeDecodeError as error:
        raise data_error(Reason.DATA_ERROR, f"row {row} is not UTF-8: {error.reason}") from error


def field_of(record: dict[str, Any], name: str) -> Any:
    """Value of a field; `a.b` also means field b of the object in field a. Returns a private marker when absent."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


def require_fields(records: Sequence[dict[str, Any]], names: dict[str, str]) -> None:
    """Check that the first row has the fields. `names` maps the spec's path to the field. Raises TrainerError(FieldNotFound)."""
    first = row_at(records, 0)
    for path, name in names.items():
        if field_of(first, name) is _MISSING:
            raise data_error(
                Reason.FIELD_NOT_FOUND,
                f"{path} is {name!r} but the data has no such field; fields: {', '.join(sorted(first))}",
            )


def read_chat_template(value: str | None) -> str | None:
    """data.chatTemplate is a file or the template itself."""
    if value is None:
        return None
    try:
        path = Path(value)
        return path.read_text(encoding="utf-8") if path.is_file() else value
    except OSError:  # a template is too long or too odd for a file name
        return value


class PromptEncoder:
    """Text or chat messages -> token ids. Text is taken as it is unless a chat template is given explicitly."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = read_chat_template(chat_template)

    def __call__(self, prompt: Any) -> tuple[NDArray[np.int32], str]:
        """Returns ([P] ids, the text that they encode). Raises TrainerError(DataError) for a prompt of another type."""
        if isinstance(prompt, str) and self._chat_template is None:
            return self._ids(prompt, special=True), prompt
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list) or not all(isinstance(turn, dict) and "role" in turn for turn in prompt):
            raise data_error(
                Reason.DATA_ERROR,
                f"a prompt must be text or a list of chat messages with role and content, not {type(prompt).__name__}",
            )
        if self._chat_template is None and not self._tokenizer.chat_template:
            raise data_error(
                Reason.DATA_ERROR,
                "prompts are chat messages but the student's tokenizer has no chat template; set data.chatTemplate",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True, chat_template=self._chat_template
            )
        except (ValueError, TypeError, TemplateError) as error:
            raise data_error(Reason.DATA_ERROR, f"the chat template refuses a prompt: {error}") from error
        return self._ids(text, special=False), text

    def _ids(self, text: str, *, special: bool) -> NDArray[np.int32]:
        return np.asarray(self._tokenizer(text, add_special_tokens=special)["input_ids"], dtype=np.int32)


class PromptStream:
    """Endless prompts in a reproducible order. Not thread-safe; `take` may tokenize for some milliseconds."""

    def __init__(
        self,
        records: Sequence[dict[str, Any]],
        encode: Callable[[Any], tuple[NDArray[np.int32], str]],
        config: Data,
    ) -> None:
        require_fields(records, {"data.promptField": config.prompt_field})
        self._records = records
        self._encode = encode
        self._config = config
        self.size = len(records)
        self.cursor = 0
        self.dropped = 0
        self.truncated = 0
        self._reissue: deque[int] = deque()
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def row_of(self, ticket: int) -> int:
        """Row behind a stream position."""
        epoch, offset = divmod(ticket, self.size)
        if not self._config.shuffle:
            return offset
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # re-issued tickets may belong to the epoch before
                self._epochs.pop(min(self._epochs))
            # RandomState's stream is frozen by NumPy's policy, so a resume with another NumPy sees the same order.
            generator = np.random.RandomState([self._config.seed & 0xFFFFFFFF, epoch])
            self._epochs[epoch] = generator.permutation(self.size)
        return int(self._epochs[epoch][offset])

    def take(self) -> Prompt:
        """The next usable prompt: first those to be issued again, then the cursor's. Raises TrainerError(Data)."""
        for _ in range(self.size + len(self._reissue) + 1):
            if self._reissue:
                ticket = self._reissue.popleft()
            else:
                ticket = self.cursor
                self.cursor += 1
            prompt = self.encode(ticket)
            if prompt is not None:
                return prompt
            self.dropped += 1
        raise data_error(
            Reason.DATA_ERROR,
            f"all {self.size} prompts are longer than data.maxPromptTokens = {self._config.max_prompt_tokens}",
        )

    def encode(self, ticket: int) -> Prompt | None:
        """The prompt behind a ticket, None when the policy drops it."""
        record = row_at(self._records, self.row_of(ticket))
        value = field_of(record, self._config.prompt_field)
        if value is _MISSING or value is None:
            raise data_error(
                Reason.FIELD_NOT_FOUND,
                f"row {self.row_of(ticket)} has no {self._config.prompt_field!r}; fields: {', '.join(sorted(record))}",
            )
        try:
            ids, text = self._encode(value)
        except TrainerError as error:
            raise data_error(error.failure.reason, f"row {self.row_of(ticket)}: {error.failure.message}") from error
        limit = self._config.max_prompt_tokens
        if len(ids) > limit:
            if self._config.overlong is Overlong.ERROR:
                raise data_error(
                    Reason.DATA_ERROR,
                    f"row {self.row_of(ticket)} has {len(ids)} tokens, data.maxPromptTokens is {limit} and data.overlong is error",
                )
            if self._config.overlong is Overlong.DROP:
                return None
            # The end of a prompt holds the question and the generation prompt, so the beginning goes.
            ids = ids[-limit:]
            self.truncated += 1
        return Prompt(
            ticket=ticket,
            ids=ids,
            text=text,
            data_source=_text(field_of(record, self._config.data_source_field)),
            answer=_none_if_missing(field_of(record, self._config.answer_field)),
            record=record,
        )

    def usable(self) -> int:
        """Prompts of one epoch after the overlong policy. Reads and tokenizes the whole file unless nothing is dropped."""
        if self._config.overlong is not Overlong.DROP:
            return self.size
        count = sum(self._fits(row) for row in range(self.size))
        if count == 0:
            raise data_error(
                Reason.DATA_ERROR,
                f"all {self.size} prompts are longer than data.maxPromptTokens = {self._config.max_prompt_tokens}",
            )
        return count

    def _fits(self, row: int) -> bool:
        value = field_of(row_at(self._records, row), self._config.prompt_field)
        return value is not None and len(self._encode(value)[0]) <= self._config.max_prompt_tokens

    def state_dict(self, outstanding: Iterable[int]) -> dict[str, Any]:
        """`outstanding` are tickets that were taken and not consumed."""
        return {
            "cursor": self.cursor,
            "reissue": sorted({*outstanding, *self._reissue}),
            "dropped": self.dropped,
            "truncated": self.truncated,
            "size": self.size,
            "seed": self._config.seed,
            "shuffle": self._config.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a checkpoint stopped. Raises TrainerError(DataError) when the data is another one."""
        now = {"size": self.size, "seed": self._config.seed, "shuffle": self._config.shuffle}
        if any(state[key] != value for key, value in now.items()):
            before = {key: state[key] for key in now}
            raise data_error(
                Reason.DATA_ERROR,
                f"the checkpoint was made with other prompts ({before}, now {now}); set training.checkpoint.resume: never",
            )
        self.cursor = int(state["cursor"])
        self.dropped = int(state["dropped"])
        self.truncated = int(state["truncated"])
        self._reissue = deque(int(ticket) for ticket in state["reissue"])


def _none_if_missing(value: Any) -> Any:
    return None if value is _MISSING else value


def _text(value: Any) -> str:
    return "" if value is _MISSING or value is None else str(value)


def steps_of_epochs(epochs: int, usable: int, prompts_per_step: int) -> int:
    """Steps that see every prompt at least `epochs` times; the last batch is filled from the next epoch."""
    return max(1, -(-epochs * usable // prompts_per_step))
