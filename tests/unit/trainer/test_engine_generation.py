"""The in-process engine: what it reports is what a plain forward of the same tokens gives."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from opd_testing.tiny_models import write_model
from transformers import AutoModelForCausalLM

from opd_trainer.interfaces import GenerateResult
from opd_trainer.rollout.engines import generator as generator_module
from opd_trainer.rollout.engines.decoding import Decoder, Row
from opd_trainer.rollout.engines.generator import Generator
from opd_trainer.rollout.engines.sampling import SamplingSettings, draw
from opd_trainer.rollout.engines.student_model import end_tokens, load_student, load_weights

torch.set_num_threads(1)
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("students")
    return [write_model(root / str(seed), seed=seed, scale=4.0) for seed in (1, 2)]


class Engine:
    """A generator and the model behind it."""

    def __init__(self, folder: Path, *, end_ids: frozenset[int] = frozenset(), max_batch: int = 8) -> None:
        self.model = load_student(folder, dtype="fp32", device="cpu", trust_remote_code=False)
        decoder = Decoder(self.model, settings=SamplingSettings(TEMPERATURE), end_ids=end_ids, pad_id=0, seed=5)
        self.generator = Generator(decoder, lambda path: load_weights(self.model, path), version=0, max_batch=max_batch)

    def submit(self, prompt: list[int], tokens: int, top_k: int = 0) -> Future[GenerateResult]:
        return self.generator.submit(Row(np.array(prompt, np.int64), tokens, top_k))


@pytest.fixture
def engine(folders: list[Path]) -> Iterator[Engine]:
    item = Engine(folders[0])
    yield item
    item.generator.stop()


def check(folder: Path, prompt: list[int], result: GenerateResult, top_k: int = 0) -> None:
    """The reported log-probabilities against a forward without cache, padding or batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[*prompt, *result.response_ids.tolist()]])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0].double() / TEMPERATURE, -1)
    rows = logprobs[len(prompt) - 1 : -1]
    labels = torch.from_numpy(result.response_ids.astype(np.int64))[:, None]
    np.testing.assert_allclose(result.logprobs, rows.gather(1, labels)[:, 0], atol=1e-4)
    if top_k:
        assert result.topk is not None
        np.testing.assert_allclose(result.topk.logprobs, rows.topk(top_k).values, atol=1e-4)


def prompts(count: int) -> list[list[int]]:
    generator = np.random.default_rng(count)
    return [generator.integers(3, 259, generator.integers(1, 12)).tolist() for _ in range(count)]


def test_rows_that_join_and_leave_at_any_time_keep_their_own_numbers(engine: Engine, folders: list[Path]) -> None:
    asked, futures = prompts(20), []
    for index, prompt in enumerate(asked):
        futures.append(engine.submit(prompt, 1 + (index * 7) % 40, top_k=index % 3))
        if index % 4 == 0:
            futures[-1].result(60)  # the next ones meet a batch in the middle of its work
    for index, (prompt, future) in enumerate(zip(asked, futures, strict=True)):
        result = future.result(60)
        assert len(result.response_ids) == 1 + (index * 7) % 40
        assert result.finish_reason == "length"
        check(folders[0], prompt, result, top_k=index % 3)


def test_samples_of_one_prompt_differ_and_are_each_right(engine: Engine, folders: list[Path]) -> None:
    futures = [engine.submit([5, 6, 7], 12) for _ in range(6)]
    results = [future.result(60) for future in futures]
    assert len({tuple(result.response_ids.tolist()) for result in results}) > 1
    for result in results:
        check(folders[0], [5, 6, 7], result)


def test_more_requests_than_the_batch_holds_all_get_their_turn(folders: list[Path]) -> None:
    engine = Engine(folders[0], max_batch=2)
    results = [future.result(60) for future in [engine.submit(prompt, 5) for prompt in prompts(9)]]
    engine.generator.stop()
    assert [len(result.response_ids) for result in results] == [5] * 9


def test_long_prompts_are_prefilled_in_parts(
    engine: Engine, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.generator._prefill_tokens = 16
    asked = [[3 + index] * 10 for index in range(4)]
    for prompt, future in [(prompt, engine.submit(prompt, 6)) for prompt in asked]:
        check(folders[0], prompt, future.result(60))


def test_the_end_token_ends_a_response_and_belongs_to_it(folders: list[Path]) -> None:
    engine = Engine(folders[0], end_ids=frozenset(range(3, 200)))
    results = [future.result(60) for future in [engine.submit(prompt, 50) for prompt in prompts(6)]]
    engine.generator.stop()
    stopped = [result for result in results if result.finish_reason == "stop"]
    assert stopped
    for result in stopped:
        *before, last = result.response_ids.tolist()
        assert 3 <= last < 200
        assert not any(3 <= token < 200 for token in before)


def test_the_end_tokens_come_from_the_generation_config(folders: list[Path], tmp_path: Path) -> None:
    assert end_tokens(folders[0]) == frozenset({1})
    assert end_tokens(tmp_path / "nowhere") == frozenset()
    folder = shutil.copytree(folders[0], tmp_path / "student")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert end_tokens(folder) == frozenset({1, 7})
    (folder / "generation_config.json").unlink()
    assert end_tokens(folder) == frozenset({1}), "config.json names one too"


def test_an_abort_returns_what_was_written_and_what_follows_runs_on_new_weights(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_module, "JOIN_EVERY", 1)
    engine = Engine(folders[0], max_batch=2)
    running = [engine.submit([5, 6], 400, top_k=2) for _ in range(3)]
    deadline = time.monotonic() + 60
    while not engine.generator._running and time.monotonic() < deadline:
        time.sleep(0.001)
    engine.generator.load(folders[1], 1, abort=True).result(60)
    for future in running:
        result = future.result(60)
        assert result.finish_reason == "abort"
        assert all(span.version == 0 for span in result.version_spans)
        assert result.topk is not None
        assert result.topk.ids.shape == (len(result.response_ids), 2)
        if len(result.response_ids):
            check(folders[0], [5, 6], result)
    after = engine.submit([5, 6], 8).result(60)
    engine.generator.stop()
    assert [span.version for span in after.version_spans] == [1]
    check(folders[1], [5, 6], after)


def test_a_drain_lets_running_responses_finish_on_the_weights_they_began_with(
    engine: Engine, folders: list[Path]
) -> None:
    running = engine.submit([5, 6], 60)
    deadline = time.monotonic() + 60
    while not engine.generator._running and time.monotonic() < deadline:
        time.sleep(0.001)
    loaded = engine.generator.load(folders[1], 1, abort=False)
    later = engine.submit([5, 6], 5)
    loaded.result(60)
    assert running.done()
    check(folders[0], [5, 6], running.result(0))
    check(folders[1], [5, 6], later.result(60))


def test_weights_of_another_model_are_refused_and_the_old_ones_go_on_serving(engine: Engine, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", hidden=16)
    with pytest.raises(ValueError, match="does not fit"):
        engine.generator.load(other, 1, abort=False).result(60)
    with pytest.raises(OSError, match="no safetensors"):
        engine.generator.load(tmp_path, 1, abort=False).result(60)
    assert engine.generator.version == 0
    assert len(engine.submit([5], 3).result(60).response_ids) == 3


def test_a_failed_forward_leaves_nobody_waiting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.model, "forward", fail)
    future = engine.submit([5, 6], 10)
    with pytest.raises(RuntimeError, match="device lost"):
        future.result(60)
    engine.generator._thread.join(10)
    assert not engine.generator.alive
    with pytest.raises(RuntimeError):
        engine.submit([5, 6], 10)


def test_a_step_that_hangs_is_seen_from_outside(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.generator.stalled_seconds() == 0.0
    entered, release = threading.Event(), threading.Event()

    def hang(_: object) -> None:
        entered.set()
        release.wait(60)

    monkeypatch.setattr(engine.generator._decoder, "step", hang)
    future = engine.submit([5, 6], 3)
    assert entered.wait(60)
    deadline = time.monotonic() + 60
    while engine.generator.stalled_seconds() < 0.2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.undo()
    release.set()
    future.result(60)
    assert engine.generator.stalled_seconds() == 0.0


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125, 0.0]]))
    source = torch.Generator().manual_seed(0)
    drawn = draw(logits.expand(40_000, -1), SamplingSettings(), source)
    shares = torch.bincount(drawn.ids, minlength=5) / 40_000
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.125, 0.125, 0.0], atol=0.01)
    assert int(torch.bincount(drawn.ids, minlength=5)[4]) == 0


def test_temperature_scales_what_is_drawn_and_what_is_reported() -> None:
    logits = torch.tensor([[2.0, 0.0]]).expand(40_000, -1)
    drawn = draw(logits, SamplingSettings(temperature=2.0), torch.Generator().manual_seed(0), top_k=2)
    expected = torch.softmax(torch.tensor([1.0, 0.0]), 0)
    assert float((drawn.ids == 0).float().mean()) == pytest.approx(float(expected[0]), abs=0.01)
    assert drawn.top_logprobs is not None
    np.testing.assert_allclose(drawn.top_logprobs[0], expected.log(), atol=1e-6)


@pytest.mark.parametrize("settings", [SamplingSettings(top_k=2), SamplingSettings(top_p=0.7)])
def test_top_k_and_top_p_cut_what_is_drawn_and_not_what_is_reported(settings: SamplingSettings) -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).expand(5_000, -1)
    drawn = draw(logits, settings, torch.Generator().manual_seed(0))
    assert set(drawn.ids.tolist()) == {0, 1}
    np.testing.assert_allclose(drawn.logprobs[drawn.ids == 0], np.log(0.5), atol=1e-6)
