"""Base class and bounded primitive types of the API.

Every list and string has an upper bound because the API server's CEL cost estimate needs them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """camelCase in YAML, snake_case in Python, unknown fields refused, values immutable."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_enum_values=False,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def to_yaml_dict(self) -> dict[str, Any]:
        """The document as a user would write it: camelCase, without empty optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


ShortText = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(max_length=1024)]
Path = Annotated[str, Field(max_length=1024)]
Url = Annotated[str, Field(max_length=1024, pattern=r"^https?://[^\s/]+")]
Name = Annotated[str, Field(max_length=253)]
TeacherName = Annotated[str, Field(max_length=16, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
Entrypoint = Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Quantity = Annotated[str, Field(max_length=64)]
#: An object whose structure Kubernetes owns (pod templates, affinities): passed through, checked by a dry run of the child.
KubernetesObject = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
