"""YAML as kubectl reads it: a key stands once, and `5e-5` is a number.

PyYAML follows YAML 1.1, where a float needs a dot and a repeated key silently wins.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

#: YAML 1.2.2, section 10.3.2: floats of the core schema, less those that are integers.
_FLOAT = re.compile(
    r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
#: Integers of YAML 1.1 without those to the base of 60: 1:30 is text.
_INTEGER = re.compile(r"^[-+]?(?:0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
#: Words that PyYAML reads otherwise than kubectl, for which a date is text.
_REPLACED = frozenset({"tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp"})
_MERGE = "tag:yaml.org,2002:merge"


class YamlError(ValueError):
    """No YAML; the message says line, column and why."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with unique keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            # A merged key may be overridden; that is what merging is for.
            if key_node.tag == _MERGE or not isinstance(key_node, yaml.ScalarNode):
                continue
            key = self.construct_object(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' stands twice in one object; remove one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in entries if entry[0] not in _REPLACED]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))


def read_documents(text: str) -> list[Any]:
    """Every document of a text that is not empty.

    Raises:
        YamlError: with line and column of what is wrong, counted from 1.
    """
    try:
        # The loader is a SafeLoader.
        return [document for document in yaml.load_all(text, _Loader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlError(f"{where}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise YamlError("objects are nested too deep") from error
    except (ValueError, AttributeError, IndexError) as error:  # how PyYAML takes `!!int x` and `!!timestamp x`
        raise YamlError(f"a tagged value is none: {error}") from error
