"""What `make demo` says at its end comes from the job's status."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from opd_api.v1alpha1.status import HeldOutReverseKl, ResultStatus

FILE = Path(__file__).resolve().parents[3] / "tools/dev/demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "demo", module)
        spec.loader.exec_module(module)
    return module


def succeeded(**result: object) -> dict[str, object]:
    return {
        "phase": "Succeeded",
        "result": ResultStatus(**result).model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def test_it_ends_with_files_and_the_held_out_reverse_kl(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = succeeded(
        report="/data/opd/r/report/index.html",
        exported_model="/data/opd/r/export",
        held_out_reverse_kl=HeldOutReverseKl(before="1.2", after="0.3"),
    )
    demo.show_result(status, demo.Target(["kubectl"], Path("/claim")))
    said = capsys.readouterr().out
    assert "file:///claim/opd/r/report/index.html" in said
    assert "1.200 nats a token before, 0.300 after, on held-out prompts: 25 %" in said


def test_what_fills_the_claim_of_a_cluster_is_as_locked_down_as_a_jobs_pods(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restricted Pod Security takes it, and it may write where they may."""
    inputs: list[str] = []
    monkeypatch.setenv("TRAINER_IMAGE", "reg/opd-trainer")
    monkeypatch.setattr(demo, "run", lambda *_: None)
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **options: inputs.append(options.get("input", "")))
    demo.fill_claim(demo.Target(["kubectl"], None))
    (pod,) = [json.loads(text) for text in inputs if text]
    assert pod["spec"]["securityContext"]["fsGroup"] == 1000
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_without_an_evaluation_it_names_the_files_only(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    demo.show_result(succeeded(exported_model="/data/opd/r/export"), demo.Target(["kubectl"], None))
    said = capsys.readouterr().out
    assert "/data/opd/r/export" in said
    assert "reverse KL" not in said
