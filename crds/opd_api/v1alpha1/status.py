"""Status of an OPDJob. Bounded everywhere: an object must never outgrow the API server's limits."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from opd_api.v1alpha1.base import ApiModel, NonNegativeInt, Path, ShortText, Text


def _is_time(text: str) -> str:
    """Somebody may have written a time into a status that the API server takes and we cannot count with."""
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time needs its zone")
    return text


Timestamp = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"}), AfterValidator(_is_time)]


class Condition(ApiModel):
    """A Kubernetes condition."""

    type: ShortText = Field(description="Type; the list is in docs/vocabulary.md.")
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    reason: ShortText = Field(description="Machine-readable reason.")
    message: Text = Field("", description="For people: what happened and what to do.")
    last_transition_time: Timestamp = Field(description="When status last changed.")
    observed_generation: NonNegativeInt | None = Field(
        None, description="Generation of the spec this was computed from."
    )


class TeacherStatus(ApiModel):
    """One teacher as seen by the operator."""

    name: ShortText = Field(description="Name of the teacher.")
    ready: NonNegativeInt = Field(0, description="Replicas that answer.")
    desired: NonNegativeInt = Field(0, description="Replicas wanted.")
    endpoint: Path | None = Field(None, description="URL that the trainer uses.")
    message: Text | None = Field(None, description="What it waits for.")


class CheckpointStatus(ApiModel):
    """A checkpoint in the run directory."""

    step: NonNegativeInt = Field(description="Step of the checkpoint.")
    path: Path = Field(description="Path on the claim.")


class TrainingStatus(ApiModel):
    """Progress as reported by the trainer."""

    step: NonNegativeInt = Field(0, description="Finished optimizer steps.")
    total_steps: NonNegativeInt = Field(0, description="Steps of the whole run.")
    percent: NonNegativeInt = Field(0, description="Finished share in percent.")
    estimated_remaining_seconds: NonNegativeInt | None = Field(
        None, description="Estimate from the last steps, in seconds."
    )
    metrics: Annotated[dict[ShortText, float], Field(max_length=32)] = Field(
        default_factory=dict, description="Last metrics."
    )
    reverse_kl: ShortText | None = Field(None, description="Last opd_reverse_kl, formatted for the KL column.")
    last_heartbeat_time: Timestamp | None = Field(None, description="When the operator last saw the trainer move.")
    last_checkpoint: CheckpointStatus | None = Field(None, description="Newest complete checkpoint.")
    weight_version: NonNegativeInt | None = Field(None, description="Version of the published weights.")
    activity: ShortText | None = Field(None, description="What the trainer is doing.")


class AttemptStatus(ApiModel):
    """One attempt at running the student."""

    number: Annotated[int, Field(ge=1)] = Field(description="Attempt number, from 1.")
    ray_job_name: ShortText | None = Field(None, description="Name of the RayJob.")
    start_time: Timestamp | None = Field(None, description="When it was created.")
    end_time: Timestamp | None = Field(None, description="When its end was seen.")
    failure_class: ShortText | None = Field(None, description="Failure class; empty when it succeeded.")
    reason: ShortText | None = Field(None, description="Machine-readable reason.")
    message: Text | None = Field(None, description="Last words, at most 1 KiB.")


class FindingStatus(ApiModel):
    """A finding of the rules or of the input check."""

    code: ShortText = Field(description="Stable code.")
    severity: ShortText = Field(description="Error, Warning or NotChecked.")
    path: Path = Field(description="Field path.")
    message: Text = Field(description="What to write instead.")


class HeldOutReverseKl(ApiModel):
    """Token-mean reverse KL on the prompts of training.evaluation, in nats."""

    before: ShortText = Field(description="Before the first step.")
    after: ShortText = Field(description="After the last step.")


class ResultStatus(ApiModel):
    """What the run left."""

    checkpoint: Path | None = Field(None, description="Last checkpoint.")
    exported_model: Path | None = Field(None, description="Exported student (safetensors, config, tokenizer).")
    report: Path | None = Field(None, description="HTML report.")
    held_out_reverse_kl: HeldOutReverseKl | None = Field(
        None, description="Reverse KL on held-out prompts, in nats; absent without training.evaluation."
    )


class OPDJobStatus(ApiModel):
    """What the operator observes."""

    observed_generation: NonNegativeInt | None = Field(
        None, description="Generation of the spec that was last reconciled."
    )
    phase: ShortText | None = Field(None, description="For people; derived from the conditions.")
    reason: ShortText | None = Field(None, description="Reason behind the phase, for the wide column.")
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
        ),
    ] = Field(default_factory=list, description="Conditions.")
    attempt: NonNegativeInt | None = Field(None, description="Current attempt.")
    start_time: Timestamp | None = Field(None, description="When the first child was created.")
    completion_time: Timestamp | None = Field(None, description="When the job ended.")
    teachers: Annotated[list[TeacherStatus], Field(max_length=32)] = Field(
        default_factory=list, description="Teachers."
    )
    teachers_ready: ShortText | None = Field(
        None, description="For the Teachers column: ready teachers of all (1/2); released when they are not needed."
    )
    step_progress: ShortText | None = Field(None, description="Step of all steps, for the Step column: 120/200.")
    training: TrainingStatus | None = Field(None, description="Progress as reported by the trainer.")
    attempts: Annotated[list[AttemptStatus], Field(max_length=10)] = Field(
        default_factory=list, description="Last ten attempts."
    )
    findings: Annotated[list[FindingStatus], Field(max_length=16)] = Field(
        default_factory=list, description="Findings."
    )
    result: ResultStatus | None = Field(None, description="What the run left.")
    retries: NonNegativeInt | None = Field(
        None, description="Counted retries; Preempted and capacity waits do not count."
    )
    next_attempt_time: Timestamp | None = Field(None, description="Not before this time a new attempt starts.")
    teacher_restarts: NonNegativeInt | None = Field(None, description="Restarts of the teachers by the operator.")
