"""A model is whole or named with what it lacks; the hub is a server of this process, asked by the hub's own library."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from opd_testing.configs import trainer_config
from opd_testing.tiny_models import write_model

from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.preflight import check
from opd_trainer.preflight import models as models_module
from opd_trainer.preflight.models import resolve_model, resolve_tokenizer
from opd_trainer.preflight.report import Found, Report

COMMIT = "a" * 40
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

OWN_CODE = """
from transformers import LlamaConfig, PreTrainedTokenizerFast
class Own(LlamaConfig):
    model_type = "own"
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


class Hub:
    """The four requests that a download makes, of one repository `org/student`."""

    def __init__(self, files: Path) -> None:
        self.files = files
        self.downloads: Counter[str] = Counter()
        #: Files that end in an error in the middle of a download.
        self.broken: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = request.path.split("?")[0]
        entries = [
            {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": self._tag(file)}
            for file in sorted(self.files.iterdir())
        ]
        if path.startswith("/api/models/org/student/tree/"):
            self._send(request, json.dumps(entries).encode())
        elif path.startswith("/api/models/org/student"):
            self._send(request, json.dumps({"id": "org/student", "sha": COMMIT, "siblings": []}).encode())
        else:
            file = self.files / path.rpartition("/")[2]
            if not file.is_file() or file.name in self.broken:
                request.send_error(403 if file.is_file() else 404)
                return
            self.downloads[file.name] += body
            headers = {"ETag": f'"{self._tag(file)}"', "X-Repo-Commit": COMMIT}
            self._send(request, file.read_bytes(), body=body, **headers)

    @staticmethod
    def _tag(file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, content: bytes, *, body: bool = True, **headers: str) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(content)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two shards with their index."""
    root = tmp_path_factory.mktemp("models") / "student"
    write_model(root, seed=1)
    whole = (root / "model.safetensors").rename(root / SHARDS[0])
    (root / SHARDS[1]).write_bytes(whole.read_bytes() + b"2")
    index = {"metadata": {}, "weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


@pytest.fixture
def hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(model)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield server
    server.stop()


def resolve(config: TrainerConfig) -> tuple[Path | None, list[Found]]:
    report = Report("input check")
    resolved = resolve_model(config, config.student.model, "spec.student.model.source", report)
    return (resolved.folder if resolved else None), report.found


def config_of(root: Path, **options: Any) -> TrainerConfig:
    return trainer_config(root, student=options.pop("source", "org/student"), **options)


def only(found: list[Found]) -> Found:
    assert len(found) == 1, found
    assert found[0].reason is Reason.MODEL_NOT_FOUND
    return found[0]


def test_a_download_that_was_cut_off_is_gone_on_with_by_the_next_check(tmp_path: Path, hub: Hub) -> None:
    config = config_of(tmp_path)
    hub.broken = {SHARDS[1]}
    folder, found = resolve(config)
    assert folder is None
    assert "cannot be downloaded" in only(found).message
    assert (tmp_path / "hf" / "hub" / "models--org--student" / "refs" / "main").is_file(), "it looks like a download"
    hub.broken = set()
    folder, found = resolve(config)
    assert folder is not None, found
    assert (folder / SHARDS[1]).is_file()
    assert hub.downloads[SHARDS[0]] == hub.downloads[SHARDS[1]] == 1, "what was there is not downloaded again"


def test_a_model_of_which_only_the_tokenizer_was_downloaded_gets_its_weights(tmp_path: Path, hub: Hub) -> None:
    config = config_of(tmp_path)
    report = Report("input check")
    folder = resolve_tokenizer(config, "org/student", "spec.teachers[0].tokenizer", report, trust_remote_code=False)
    assert folder is not None, report.found
    assert not list(folder.glob("*.safetensors"))
    assert resolve(config)[0] == folder
    assert len(list(folder.glob("*.safetensors"))) == 2


@pytest.fixture
def own_code(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository as one whose configuration and tokenizer are programs of its own."""
    hub.files = shutil.copytree(hub.files, tmp_path / "repository")
    for name, kind in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        document = json.loads((hub.files / name).read_text())
        entry = "own_code.Own" if kind == "AutoConfig" else [None, "own_code.OwnTokenizer"]
        (hub.files / name).write_text(json.dumps({**document, "model_type": "own", "auto_map": {kind: entry}}))
    (hub.files / "own_code.py").write_text(OWN_CODE)
    # transformers copies such code here and imports it.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    return hub.files / "own_code.py"


def trusting(config: TrainerConfig) -> TrainerConfig:
    model = config.student.model.model_copy(update={"trust_remote_code": True})
    return config.model_copy(update={"student": config.student.model_copy(update={"model": model})})


def test_code_of_a_repository_is_downloaded_where_it_is_trusted_and_nowhere_else(
    tmp_path: Path, hub: Hub, own_code: Path
) -> None:
    config = config_of(tmp_path)
    assert "config.json is not understood" in only(resolve(config)[1]).message
    assert not hub.downloads[own_code.name]
    folder, found = resolve(trusting(config))
    assert folder is not None, found
    assert (folder / own_code.name).is_file()


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_a_tokenizer_is_downloaded_where_it_is_trusted(
    tmp_path: Path, hub: Hub, own_code: Path, trusted: bool
) -> None:
    config, report = config_of(tmp_path, source=str(hub.files)), Report("input check")
    config = config.model_copy(update={"student": config.student.model_copy(update={"tokenizer": "org/student"})})
    facts = check._student_tokenizer(trusting(config) if trusted else config, None, report)
    assert hub.downloads[own_code.name] == trusted
    assert facts is not None, report.found


def test_code_that_does_not_run_here_is_a_finding(tmp_path: Path, hub: Hub, own_code: Path) -> None:
    for line, said in (("import no_such_package", "no_such_package"), ("raise RuntimeError('too old')", "too old")):
        own_code.write_text(f"{line}\n{OWN_CODE}")
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        assert said in only(resolve(trusting(config_of(tmp_path)))[1]).message


def test_a_whole_copy_is_used_when_the_hub_is_gone(tmp_path: Path, hub: Hub) -> None:
    config = config_of(tmp_path)
    folder, _ = resolve(config)
    hub.stop()
    assert resolve(config) == (folder, [])


def test_a_copy_that_was_brought_by_hand_is_used_when_the_hub_is_gone(tmp_path: Path, hub: Hub, model: Path) -> None:
    hub.stop()
    repository = tmp_path / "hf" / "hub" / "models--org--student"
    shutil.copytree(model, repository / "snapshots" / "main")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("main")
    assert resolve(config_of(tmp_path)) == (repository / "snapshots" / "main", [])


def test_a_whole_copy_is_used_when_something_before_the_hub_refuses(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    folder, _ = resolve(config)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    huggingface_hub.close_session()
    try:
        assert resolve(config) == (folder, [])
    finally:
        monkeypatch.undo()
        huggingface_hub.close_session()


def test_a_hub_that_is_gone_before_all_is_there_is_an_infrastructure_failure(tmp_path: Path, hub: Hub) -> None:
    config = config_of(tmp_path)
    hub.broken = {SHARDS[1]}
    resolve(config)
    hub.stop()
    folder, found = resolve(config)
    assert folder is None
    assert only(found).error_class is FailureClass.INFRASTRUCTURE
    assert SHARDS[1] in only(found).message


@pytest.mark.parametrize("download", [True, False])
def test_a_folder_without_a_shard_that_its_index_names_is_incomplete(
    tmp_path: Path, model: Path, download: bool
) -> None:
    folder = shutil.copytree(model, tmp_path / "student")
    config = config_of(tmp_path, source=str(folder), preflight={"download": download})
    assert resolve(config) == (folder, [])
    (folder / SHARDS[1]).unlink()
    assert f"lacks {SHARDS[1]}, which its model.safetensors.index.json names" in only(resolve(config)[1]).message
    (folder / SHARDS[1]).symlink_to(tmp_path / "no blob")
    assert f"lacks {SHARDS[1]}" in only(resolve(config)[1]).message
    (folder / "model.safetensors.index.json").unlink()
    assert f"lacks {SHARDS[1]}, which the others are numbered for" in only(resolve(config)[1]).message
    (folder / SHARDS[0]).unlink()
    assert "no safetensors" in only(resolve(config)[1]).message


def test_an_index_that_was_cut_off_is_named(tmp_path: Path, model: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "student")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text()[:40])
    assert (
        "model.safetensors.index.json is no index" in only(resolve(config_of(tmp_path, source=str(folder)))[1]).message
    )


def test_without_a_download_what_is_missing_on_the_claim_is_named(tmp_path: Path, hub: Hub) -> None:
    hub.broken = {SHARDS[1]}
    resolve(config_of(tmp_path))
    assert f"lacks {SHARDS[1]}" in only(resolve(config_of(tmp_path, preflight={"download": False}))[1]).message


def test_numbers_of_shards_say_how_many_there_are() -> None:
    assert models_module._numbered({"m-00003-of-00003.safetensors", "model.safetensors"}) == {
        f"m-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    }
