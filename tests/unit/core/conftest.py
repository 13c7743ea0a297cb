from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# The helpers beside the tests (oracle_map, …) are imported by name; importlib mode adds no folder of its own.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--oracles",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder with manifest.json and its npz files (format opd-oracle-vectors/1) instead of the committed one",
    )
    parser.addoption("--update-docs", action="store_true", help="rewrite the pages that the tests generate")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
