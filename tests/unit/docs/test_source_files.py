"""No source file outgrows what can be read at one go."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "dev" / "file_lengths.py"


@pytest.fixture
def lengths() -> ModuleType:
    spec = importlib.util.spec_from_file_location("file_lengths", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_source_file_is_too_long(lengths: ModuleType) -> None:
    assert lengths.too_long() == []


def test_a_long_file_is_named_with_its_length(lengths: ModuleType, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "long.py").write_text("\n" * 401)
    (tmp_path / "short.py").write_text("\n" * 400)
    (tmp_path / "long.md").write_text("\n" * 900)
    assert lengths.too_long(tmp_path) == ["long.py: 401 lines"]
