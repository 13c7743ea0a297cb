"""YAML is read as kubectl reads it."""

import pytest

from opd_api.yaml_documents import YamlError, read_documents


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-5", 5e-5),
        ("1E3", 1e3),
        ("-2.5e+3", -2500.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("1", 1),
        ("0x10", 16),
        ("e5", "e5"),
        ("5e", "5e"),
        ("1.2.3", "1.2.3"),
        ("'5e-5'", "5e-5"),
        ("2026-11-29e", "2026-11-29e"),
        ("1_000", 1000),
        ("010", 8),
        ("-3", -3),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("2024-13-45", "2024-13-45"),
        ("2024-01-01T00:00:00Z", "2024-01-01T00:00:00Z"),
    ],
)
def test_numbers_with_an_exponent_need_no_dot(text: str, value: object) -> None:
    (document,) = read_documents(f"a: {text}")
    assert document == {"a": value}
    assert type(document["a"]) is type(value)


def test_a_key_that_stands_twice_is_refused_with_its_place() -> None:
    with pytest.raises(YamlError, match="line 3, column 3: the key 'steps' stands twice"):
        read_documents("training:\n  steps: 16\n  steps: 20\n")


def test_a_merged_key_may_be_overridden() -> None:
    assert read_documents("base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}")[0]["more"] == {"a": 1, "b": 3}


def test_a_syntax_error_says_where() -> None:
    with pytest.raises(YamlError, match=r"^line 2, column 1: expected"):
        read_documents("a: [1\n")


def bomb(levels: int, opening: str = "[", closing: str = "]") -> str:
    """Nine aliases of the level below on each level."""
    lines = ["l0: &l0 {a: lol}"]
    for level in range(1, levels):
        below = ", ".join([f"*l{level - 1}"] * 9)
        lines.append(f"l{level}: &l{level} {opening}{below}{closing}")
    return "\n".join(lines)


LONG_TEXT = "a: &a " + "x" * 10_000 + "\nb: [" + ", ".join(["*a"] * 1000) + "]"


@pytest.mark.parametrize("text", [bomb(9), bomb(40), bomb(9, "{<<: [", "]}"), LONG_TEXT], ids=len)
def test_aliases_that_grow_without_end_are_refused_before_they_are_written_out(text: str) -> None:
    with pytest.raises(YamlError, match=r"line 1, column 1: with its aliases written out .* write fewer aliases"):
        read_documents(text)


def test_a_chain_of_aliases_that_nests_without_end_is_refused() -> None:
    lines = ["l0: &l0 [x]", *(f"l{level}: &l{level} [*l{level - 1}]" for level in range(1, 3000))]
    with pytest.raises(YamlError):
        read_documents("\n".join(lines))


def test_aliases_as_people_write_them_are_read() -> None:
    (document,) = read_documents("common: &common {cpu: 1}\nroles: [" + ", ".join(["*common"] * 500) + "]")
    assert document["roles"] == [{"cpu": 1}] * 500


def test_empty_documents_are_none() -> None:
    assert read_documents("---\n---\na: 1\n---\n") == [{"a": 1}]


@pytest.mark.parametrize("text", ["!!int x", "!!int ''", "!!float x", "!!timestamp x", "[" * 5000 + "]" * 5000])
def test_whatever_cannot_be_read_is_an_error_of_the_file(text: str) -> None:
    with pytest.raises(YamlError):
        read_documents(f"a: {text}")
