"""How the learner builds its models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from opd_api.v1alpha1 import Model
from opd_trainer.learner import models


class Built(nn.Module):
    def tie_weights(self) -> None:
        """As transformers' models do."""


@pytest.mark.parametrize(
    ("trusted", "auto_map", "expected"),
    [
        (True, {"AutoModel": "own_code.Own"}, "v2"),
        (True, {}, None),
        (False, {"AutoModel": "own_code.Own"}, None),
    ],
)
def test_trusted_code_comes_from_the_revision_of_its_model(
    monkeypatch: pytest.MonkeyPatch, trusted: bool, auto_map: dict[str, str], expected: str | None
) -> None:
    """Without it transformers looks for the code of the hub's main, which nobody downloaded."""
    asked: list[dict[str, Any]] = []

    class AutoModel:
        @staticmethod
        def from_config(config: Any, **options: Any) -> nn.Module:
            asked.append(options)
            return Built()

    config = SimpleNamespace(auto_map=auto_map)
    monkeypatch.setattr(models, "AutoConfig", SimpleNamespace(from_pretrained=lambda *_, **__: config))
    model = Model(source="org/student", revision="v2", trust_remote_code=trusted)
    models._skeleton(AutoModel, model, torch.float32, "sdpa")
    assert asked[0].get("code_revision") == expected
    assert asked[0]["trust_remote_code"] is trusted
