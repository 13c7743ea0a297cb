"""What the trainer tells the operator: the progress document and the final document.

Both live in the ConfigMap `<job>-progress` (locally: files of the same names in the run directory), each as JSON under
its own key. The operator ignores documents of another attempt and measures age from when *it* saw `sequence` change.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from opd_api.v1alpha1.base import ApiModel, ShortText, Text
from opd_api.v1alpha1.status import CheckpointStatus, FindingStatus, ResultStatus
from opd_api.vocabulary import FailureClass, Outcome, TrainerPhase, TrainerTask

#: Keys of the ConfigMap's data.
PROGRESS_KEY = "progress"
FINAL_KEY = "final"
#: Written documents are copied into the status, whose integers are 64 bits wide; JSON readers keep 53 of them.
Count = Annotated[int, Field(ge=0, le=2**53)]
#: Seconds between two heartbeats.
HEARTBEAT_SECONDS = 15


class ProgressDocument(ApiModel):
    """A heartbeat."""

    attempt: Annotated[int, Field(ge=1, le=2**31)] = Field(description="Attempt that writes.")
    sequence: Count = Field(description="Grows with every document of the attempt.")
    phase: TrainerPhase = Field(description="What the trainer is doing.")
    task: TrainerTask | None = Field(None, description="In phase Training: what it waits for.")
    step: Count = Field(0, description="Finished optimizer steps.")
    total_steps: Count = Field(0, description="Steps of the whole run.")
    activity: Count = Field(
        0,
        description="Samples generated + scored + micro-batches + bytes of checkpoint and download: grows while work is done.",
    )
    metrics: Annotated[dict[ShortText, float], Field(max_length=32)] = Field(
        default_factory=dict, description="Last metrics."
    )
    last_checkpoint: CheckpointStatus | None = Field(None, description="Newest complete checkpoint.")
    weight_version: Count = Field(0, description="Version of the published weights.")
    estimated_remaining_seconds: Count | None = Field(None, description="Estimate from the last steps, in seconds.")
    unavailable_teacher: ShortText | None = Field(
        None, description="Teacher that does not answer, in phase TeacherUnavailable."
    )
    sample_errors: Annotated[list[Text], Field(max_length=5)] = Field(
        default_factory=list, description="Last sample errors."
    )


class FinalDocument(ApiModel):
    """How it ended. The authority for an attempt; the termination message of check and probe Jobs."""

    attempt: Annotated[int, Field(ge=1, le=2**31)] = Field(description="Attempt that ended.")
    outcome: Outcome = Field(description="Succeeded, Preempted or Failed.")
    failure_class: FailureClass | None = Field(None, description="Class of a failure.")
    reason: ShortText | None = Field(None, description="Machine-readable reason.")
    message: Text = Field("", description="What happened and what to do, at most 1 KiB.")
    teacher: ShortText | None = Field(None, description="Teacher that is to blame, if one is.")
    step: Count = Field(0, description="Finished optimizer steps.")
    checkpoint: CheckpointStatus | None = Field(None, description="Newest complete checkpoint.")
    result: ResultStatus | None = Field(None, description="What the run left.")
    findings: Annotated[list[FindingStatus], Field(max_length=16)] = Field(
        default_factory=list, description="Findings of the check."
    )
