"""Student, teachers and routing."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from opd_api.v1alpha1.base import ApiModel, Name, Path, PositiveInt, Seconds, ShortText, TeacherName, Url
from opd_api.v1alpha1.enums import Dtype, RoutingMode, TeacherBackend
from opd_api.v1alpha1.placement import SecretKeyReference, TemplatedPlacement


class Model(ApiModel):
    """A model by hub id or path."""

    source: Path = Field(description="Hub id (Qwen/Qwen3-8B) or absolute path visible to the pods.")
    revision: ShortText | None = Field(None, description="Hub revision.")
    dtype: Dtype = Field(
        Dtype.BF16, description="Type of the exported weights (student) or of the served weights (teacher)."
    )
    trust_remote_code: bool = Field(False, description="Allow code from the model repository to run.")


class Lora(ApiModel):
    """Train adapters instead of all weights."""

    rank: Annotated[int, Field(ge=1, le=1024)] = Field(32, description="Rank of the adapters.")
    alpha: Annotated[float, Field(gt=0)] = Field(64.0, description="Scaling numerator.")
    target_modules: Annotated[list[ShortText], Field(max_length=64)] = Field(
        default_factory=list, description="Module names; empty means all linear layers except the head."
    )


class Student(ApiModel):
    """The model that learns."""

    model: Model = Field(description="Initial weights of the student.")
    lora: Lora | None = Field(None, description="Low-rank adapters; absent means full fine-tuning.")
    tokenizer: Path | None = Field(None, description="Tokenizer source; default is the model's.")


class Teacher(TemplatedPlacement):
    """One teacher: managed (`model`) or external (`endpoints`), never both."""

    name: TeacherName = Field(description="Name of the teacher; used in routing, metrics and child names.")
    backend: TeacherBackend = Field(
        TeacherBackend.SGLANG,
        description="Server that runs a managed teacher, or the protocol that an external one speaks.",
    )
    image: Name | None = Field(
        None, description="Image of the server; default is the operator's setting for the backend."
    )
    model: Model | None = Field(None, description="Model of a managed teacher.")
    replicas: Annotated[int, Field(ge=1, le=256)] = Field(1, description="Server replicas.")
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = Field(1, description="Accelerators per replica.")
    max_context_tokens: PositiveInt | None = Field(None, description="Context length to serve; default is the model's.")
    args: Annotated[list[Annotated[str, Field(max_length=512)]], Field(max_length=64)] = Field(
        default_factory=list, description="Further arguments of the server. Never a secret."
    )
    endpoints: Annotated[list[Url], Field(max_length=32)] = Field(
        default_factory=list, description="URLs of an external teacher; a DNS name stands for all its addresses."
    )
    api_key_secret_ref: SecretKeyReference | None = Field(None, description="API key of an external teacher.")
    tokenizer: Path | None = Field(None, description="Tokenizer of an external teacher, for the tokenizer check.")
    request_timeout_seconds: Seconds = Field(600, description="Deadline of one scoring request, in seconds.")
    max_retries: Annotated[int, Field(ge=0, le=20)] = Field(
        2, description="Retries after errors of reachable replicas."
    )
    max_concurrency: Annotated[int, Field(ge=1, le=4096)] = Field(128, description="Requests in flight per replica.")
    max_tokens_in_flight: PositiveInt | None = Field(
        None, description="Tokens in flight per replica; default unbounded."
    )
    weight: Annotated[float, Field(gt=0)] = Field(1.0, description="Weight in an ensemble.")
    startup_timeout_seconds: Seconds = Field(1800, description="How long one replica may load, in seconds.")
    prefix_caching: bool = Field(True, description="Let samples of one prompt share its KV cache.")

    @property
    def external(self) -> bool:
        """True when the teacher is somebody else's server."""
        return bool(self.endpoints)

    @property
    def served_by_operator(self) -> bool:
        """True when the operator creates a Deployment for it."""
        return self.model is not None and self.backend is not TeacherBackend.INPROCESS


class Routing(ApiModel):
    """Which teacher scores which sample."""

    key: ShortText = Field("data_source", description="Sample field that selects the teacher.")
    map: Annotated[dict[ShortText, TeacherName], Field(max_length=256)] = Field(
        default_factory=dict, description="Value of the key -> teacher name."
    )
    default: TeacherName | None = Field(None, description="Teacher for values that the map lacks.")
    strict: bool = Field(
        True, description="Fail on a value without a teacher; false leaves its rows out before any rollout."
    )
    mode: RoutingMode = Field(
        RoutingMode.ROUTE, description="route: one teacher a sample; ensemble: all, mixed by weight."
    )
