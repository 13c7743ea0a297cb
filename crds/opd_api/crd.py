"""Models -> CustomResourceDefinition: a structural OpenAPI v3 schema, CEL rules, columns. `python -m opd_api.crd` prints it.

Structural means: no references, no null, one type for each field, unknown fields only where they are said to be preserved.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from opd_api import GROUP, KIND, PLURAL, VERSION
from opd_api.cel import VALIDATIONS
from opd_api.v1alpha1 import OPDJob

Schema = dict[str, Any]
#: The API server refuses objects over 1.5 MB, and client-side apply stores the text a second time in an annotation of at most
#: 256 KiB.
MAX_BYTES = 200_000
_KEPT = frozenset(
    {
        "description",
        "default",
        "enum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maximum",
        "maxProperties",
        "minItems",
        "minLength",
        "minimum",
        "pattern",
        "properties",
        "required",
        "type",
    }
)
COLUMNS: tuple[Schema, ...] = (
    {"name": "Phase", "type": "string", "jsonPath": ".status.phase", "description": "Where the job stands."},
    {
        "name": "Teachers",
        "type": "string",
        "jsonPath": ".status.teachersReady",
        "description": "Ready teachers of all; released when they are not needed.",
    },
    {"name": "Step", "type": "string", "jsonPath": ".status.stepProgress", "description": "Step of all steps."},
    {
        "name": "KL",
        "type": "string",
        "jsonPath": ".status.training.reverseKl",
        "description": "Reverse KL of the last step, in nats.",
    },
    {
        "name": "Age",
        "type": "date",
        "jsonPath": ".metadata.creationTimestamp",
        "description": "Since the job was made.",
    },
    {"name": "Attempt", "type": "integer", "jsonPath": ".status.attempt", "priority": 1, "description": "Attempt."},
    {
        "name": "Reason",
        "type": "string",
        "jsonPath": ".status.reason",
        "priority": 1,
        "description": "Reason behind the phase.",
    },
    {
        "name": "Checkpoint",
        "type": "string",
        "jsonPath": ".status.training.lastCheckpoint.path",
        "priority": 1,
        "description": "Newest complete checkpoint.",
    },
)


def crd() -> Schema:
    """The CustomResourceDefinition of OPDJob."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["opd"],
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema()},
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [dict(column) for column in COLUMNS],
                }
            ],
        },
    }


def schema() -> Schema:
    """openAPIV3Schema of the kind, with every x-kubernetes-validations in its place."""
    root = structural(OPDJob)
    # Kubernetes owns metadata and forbids a schema for it.
    root["properties"]["metadata"] = {"type": "object"}
    for name in ("apiVersion", "kind"):
        root["properties"][name] = {"type": "string", "description": root["properties"][name]["description"]}
    root["required"] = ["spec"]
    for path, validations in VALIDATIONS.items():
        _at(root, path)["x-kubernetes-validations"] = [item.to_schema() for item in validations]
    return root


def structural(model: type[BaseModel]) -> Schema:
    """A model as a structural schema. Raises ValueError for a type that has none."""
    generated = model.model_json_schema(by_alias=True)
    result = _convert(generated, generated.get("$defs", {}), model.__name__)
    _add_list_defaults(model, result)
    return result


def _convert(node: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Schema:
    if "$ref" in node:
        target = definitions[str(node["$ref"]).rpartition("/")[2]]
        return _convert({**target, **{key: value for key, value in node.items() if key != "$ref"}}, definitions, path)
    if "anyOf" in node:
        members = [member for member in node["anyOf"] if member.get("type") != "null"]
        merged = members[0] if len(members) == 1 else _union(members, path)
        rest = {key: value for key, value in node.items() if key != "anyOf"}
        return _convert({**merged, **rest}, definitions, path)
    result = {key: value for key, value in node.items() if key in _KEPT or key.startswith("x-kubernetes-")}
    if result.get("default", ...) is None:
        del result["default"]
    if "const" in node:
        result["enum"] = [node["const"]]
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in node:
            result |= {bound: node[exclusive], exclusive: True}
    if "type" not in result and not result.get("x-kubernetes-int-or-string"):
        raise ValueError(f"{path} has no single type: {dict(node)}")
    if "properties" in node:
        result["properties"] = {
            name: _convert(child, definitions, f"{path}.{name}") for name, child in node["properties"].items()
        }
    if "items" in node:
        result["items"] = _convert(node["items"], definitions, f"{path}[]")
    values = node.get("additionalProperties")
    if isinstance(values, Mapping):
        result["additionalProperties"] = _convert(values, definitions, f"{path}.*")
    return result


def _union(members: list[Mapping[str, Any]], path: str) -> Schema:
    """`int | str` and `Literal | pattern` are the unions that a structural schema can say."""
    kinds = {str(member.get("type")) for member in members}
    if kinds == {"integer", "string"}:
        return {"x-kubernetes-int-or-string": True}
    if kinds == {"string"} and sum("enum" in member for member in members) == 1:
        words = next(member["enum"] for member in members if "enum" in member)
        patterned = next(member for member in members if "enum" not in member)
        form = str(patterned["pattern"]).removeprefix("^").removesuffix("$")
        return {**patterned, "pattern": f"^({'|'.join(words)}|{form})$"}
    raise ValueError(f"{path}: a structural schema cannot say {members}")


def _add_list_defaults(model: type[BaseModel], node: Schema) -> None:
    """Default lists with a content come from factories, which JSON schema does not see."""
    for name, field in model.model_fields.items():
        child = node["properties"][field.alias or name]
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and "properties" in child:
            _add_list_defaults(annotation, child)
        elif child.get("type") == "array" and field.default_factory is not None:
            value = field.get_default(call_default_factory=True, validated_data={})
            if value:
                child["default"] = value


def _at(root: Schema, path: str) -> Schema:
    node = root
    for part in path.split(".") if path else []:
        node = node["properties"][part.removesuffix("[]")]
        if part.endswith("[]"):
            node = node["items"]
    return node


class _Dumper(yaml.SafeDumper):
    """Without anchors, lists indented as kubectl prints them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """Lines as lines: a document or a script in a field stays readable."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def to_yaml(document: Any) -> str:
    """Stable YAML: keys in the order of the models."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    sys.stdout.write(to_yaml(crd()))
