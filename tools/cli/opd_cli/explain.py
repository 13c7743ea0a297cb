"""`opd explain`: fields, rules and words, from the same models that generate the CRD and the documentation."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape

from opd_api import vocabulary
from opd_api.cel import AT_APPLY
from opd_api.crd import Schema, schema
from opd_api.docs import LEVELS, default_text, field_type
from opd_api.rules import RULES, Rule
from opd_api.rules.facts import FACT_RULES
from opd_api.rules.schema import closest
from opd_api.vocabulary import Words
from opd_cli.console import complain, output
from opd_cli.exits import Exit


def run(name: str) -> int:
    """Print what is known of a field path, a code or a word."""
    path = name.strip().strip(".").replace("[]", "").removeprefix("opdjob.")
    fields = dict(_fields(schema(), ""))
    for candidate in (path, f"spec.{path}"):
        if candidate in fields:
            _print_field(candidate, fields[candidate])
            return Exit.OK
    known = _print_rules(name) | _print_words(name)
    if known:
        return Exit.OK
    suffixes = _ending_in(path, list(fields))
    if len(suffixes) == 1:
        _print_field(suffixes[0], fields[suffixes[0]])
        return Exit.OK
    names = [rule.code for rule in RULES] + [word.value for _, word in _words()]
    guess = closest(path, [*(item.removeprefix("spec.") for item in fields), *names])
    meant = [item.removeprefix("spec.") for item in suffixes[:4]] or ([guess] if guess else [])
    hint = f" Did you mean {' or '.join(meant)}?" if meant else " `opd explain spec` lists the sections."
    complain(escape(f"there is no field, rule or word {name!r}.{hint}"))
    return Exit.REFUSED


def _ending_in(path: str, fields: list[str]) -> list[str]:
    """Fields whose path ends so; those of the status only when the spec has none."""
    found = [item for item in fields if item.lower().endswith(f".{path.lower()}")]
    return [item for item in found if item.startswith("spec.")] or found


def _fields(node: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    for name, child in node.get("properties", {}).items():
        inner = f"{path}.{name}".lstrip(".")
        if inner in ("apiVersion", "kind", "metadata"):
            continue
        yield inner, child
        yield from _fields(child.get("items", child), inner)


def _print_field(path: str, node: Schema) -> None:
    console = output()
    console.print(f"[bold]{path}[/bold]  {escape(field_type(node))}{_default(node)}")
    console.print(f"  {escape(node.get('description', ''))}")
    inner = node.get("items", node)
    required = inner.get("required", [])
    for name, child in inner.get("properties", {}).items():
        mark = " [red]required[/red]" if name in required else _default(child)
        console.print(f"    [bold]{name}[/bold]  {escape(field_type(child))}{mark}")
        console.print(f"        {escape(child.get('description', ''))}")


def _default(node: Schema) -> str:
    return f"  default {escape(default_text(node['default']))}" if "default" in node else ""


def _print_rules(code: str) -> bool:
    rules: list[Rule] = [rule for rule in RULES if rule.code.lower() == code.lower()]
    for rule in rules:
        at_apply = " Also kept by the API server." if rule.code in AT_APPLY else ""
        _entry(
            f"rule {rule.number}",
            rule.code,
            f"{rule.summary}. Level {rule.level.value}: {LEVELS[rule.level]}.{at_apply}",
        )
    facts = [item for item in FACT_RULES if item[1].lower() == code.lower()]
    for number, name, level, summary in facts:
        _entry(f"rule {number}", name, f"{summary} ({level})")
    return bool(rules or facts)


def _words() -> Iterator[tuple[str, Words]]:
    for holder, kind in vars(vocabulary).items():
        if isinstance(kind, type) and issubclass(kind, Words) and kind is not Words:
            for word in kind:
                yield holder, word


def _print_words(name: str) -> bool:
    found = [(holder, word) for holder, word in _words() if word.value.lower() == name.lower()]
    for holder, word in found:
        _entry(holder, word.value, word.explanation)
    return bool(found)


def _entry(kind: str, name: str, text: str) -> None:
    output().print(f"[bold]{escape(name)}[/bold]  ({kind})\n  {escape(text)}")
