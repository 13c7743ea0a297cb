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
#: Characters of a document with every alias written out. The API server takes 3 MiB in one request and stores half of it.
EXPANDED_LIMIT = 4 << 20
#: What a value costs besides its characters: quotes, separators, the object in memory.
_NODE_CHARACTERS = 8


class YamlError(ValueError):
    """No YAML; the message says line, column and why."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with unique keys, of documents that stay small when their aliases are written out."""

    def construct_document(self, node: yaml.Node) -> Any:
        if _expanded(node, {}) > EXPANDED_LIMIT:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"with its aliases written out the document has more than {EXPANDED_LIMIT >> 20} Mi characters, which no API "
                "server takes; write fewer aliases (*name) of objects that hold aliases themselves",
                node.start_mark,
            )
        return super().construct_document(node)

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


def _expanded(node: yaml.Node, known: dict[int, int]) -> int:
    """Characters of a node with every alias written out. An alias of what it stands in counts nothing here: whoever reads the
    document finds that it contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return len(node.value) + _NODE_CHARACTERS
    if id(node) not in known:
        known[id(node)] = 0
        inner = [item for pair in node.value for item in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = _NODE_CHARACTERS + sum(_expanded(item, known) for item in inner)
    return known[id(node)]


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
