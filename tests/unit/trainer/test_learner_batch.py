"""From samples to tensors: response token j is predicted at position P - 1 + j, in every layout."""

import numpy as np
import pytest
import torch
from opd_testing import learner as testing

from opd_trainer.learner.batch import build, input_length
from opd_trainer.learner.packing import Layout

CPU = torch.device("cpu")


def made(samples: list, layout: Layout) -> object:
    return build(samples, layout, task=None, device=CPU, dtype=torch.float64)


@pytest.mark.parametrize("layout", list(Layout))
def test_each_row_reads_the_token_before_the_one_it_predicts(layout: Layout) -> None:
    samples = testing.samples(5)
    batch = made(samples, layout)
    read = batch.input_ids.flatten()[batch.rows]
    position = batch.position_ids.flatten()[batch.rows]
    row = 0
    for sample in samples:
        whole = np.concatenate([sample.prompt_ids, sample.response_ids])
        for j in np.flatnonzero(sample.loss_mask):
            at = len(sample.prompt_ids) - 1 + j
            assert read[row] == whole[at]
            assert position[row] == at
            assert batch.labels[row] == whole[at + 1]
            row += 1
    assert row == len(batch.rows)


@pytest.mark.parametrize("layout", list(Layout))
def test_values_of_a_sample_land_on_its_row_of_the_grid(layout: Layout) -> None:
    samples = testing.samples(5)
    batch = made(samples, layout)
    for row, sample in enumerate(samples):
        length = sample.response_length
        np.testing.assert_allclose(batch.teacher[row, :length], sample.teacher_logprobs, rtol=1e-6)
        np.testing.assert_array_equal(batch.trained[row, :length], sample.loss_mask > 0)
        assert not batch.trained[row, length:].any()
    assert torch.equal(batch.to_grid(batch.flatten(batch.teacher)), torch.where(batch.computed, batch.teacher, 0.0))


def test_padded_costs_the_rectangle_and_packed_the_sum() -> None:
    samples = testing.samples(5)
    lengths = [input_length(sample) for sample in samples]
    assert made(samples, Layout.PADDED).input_ids.shape == (5, max(lengths))
    assert made(samples, Layout.PACKED).input_ids.shape == (1, sum(lengths))


def test_token_sets_follow_the_trained_rows_and_smaller_sets_are_filled_up() -> None:
    samples = testing.samples(4, top_k=4)
    samples[1].selected = testing.samples(4, top_k=2)[1].selected
    batch = made(samples, Layout.PADDED)
    assert batch.selected.ids.shape == (len(batch.rows), 4)
    rows = [int(s.loss_mask.sum()) for s in samples]
    second = batch.selected.valid[rows[0] : rows[0] + rows[1]]
    assert second[:, :2].all()
    assert not second[:, 2:].any()
    kept = np.flatnonzero(samples[2].loss_mask)
    start = rows[0] + rows[1]
    np.testing.assert_array_equal(batch.selected.ids[start : start + rows[2]], samples[2].selected.ids[kept])


def test_a_sample_without_trained_tokens_keeps_a_row_that_trains_nothing() -> None:
    samples = testing.samples(1)
    samples[0].loss_mask[:] = 0
    batch = made(samples, Layout.PADDED)
    assert len(batch.rows) == 1
    assert not batch.trained.any()


def test_no_samples_make_a_dummy_with_one_row_that_trains_nothing() -> None:
    batch = made([], Layout.PACKED)
    assert batch.empty
    assert len(batch.rows) == 1
    assert not batch.trained.any()
