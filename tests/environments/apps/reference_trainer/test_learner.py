"""The arithmetic of the reference trainer, on a tiny random llama through the code that trains the real one."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("jax") is None or find_spec("gguf") is None:
    pytest.skip("jax or gguf is not installed (extra learn)", allow_module_level=True)

import gguf
import jax

from environments.apps.reference_trainer.checkpoint import (
    CheckpointMismatch,
    load_checkpoint,
    save_checkpoint,
    write_adapter,
)
from environments.apps.reference_trainer.learner import Learner, loss_and_gradient
from environments.apps.reference_trainer.llama import LINEARS, UnsupportedModel, load_model, logprobs
from environments.apps.reference_trainer.microbatches import microbatches
from environments.apps.reference_trainer.rows import read_batch, shifted, shuffled
from environments.apps.reference_trainer.trainer_settings import TrainerSettings
from support.tiny_llama import VOCABULARY, wire_group, write_tiny_llama

SETTINGS = TrainerSettings(first_layer=1, rank=2, alpha=4, learning_rate=3e-3)
compiled_logprobs = jax.jit(logprobs, static_argnums=(0, 3))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf"), SETTINGS.first_layer)


@pytest.fixture
def learner(model):
    return Learner(model, SETTINGS)


@pytest.fixture
def lora(learner):
    """An adapter that does something."""
    rng = np.random.default_rng(5)
    return jax.tree.map(
        lambda x: x if x.any() else (rng.standard_normal(x.shape) * 0.3).astype(np.float32), learner.start().lora
    )


def batch(groups=2, beginning=40, turns=2, seed=0):
    rng = np.random.default_rng(seed)
    shared = [int(i) for i in rng.integers(3, len(VOCABULARY), beginning)]
    return [wire_group(rng, beginning=shared, turns=turns, name=f"g{i}") for i in range(groups)]


def rows_of(groups):
    return read_batch(groups, SETTINGS.std_floor)


def flat_logprobs(learner, lora, rows, share, max_segments=36):
    """Of the trained tokens, in the order of the microbatches."""
    found = []
    for part in microbatches(rows, max_segments, share):
        values = compiled_logprobs(learner.model.shape, learner.model.weights, lora, learner.scale, part)
        found.append(np.asarray(values)[part.valid > 0])
    return np.concatenate(found)


def gradient_of(learner, lora, rows, share=True, max_segments=36):
    tokens, total = sum(len(row.trained) for row in rows), None
    for part in microbatches(rows, max_segments, share):
        _, gradient = loss_and_gradient(
            lora, learner.model.weights, part, float(tokens), learner.model.shape, learner.scale, SETTINGS.ratio_cap
        )
        total = gradient if total is None else jax.tree.map(np.add, total, gradient)
    return total


def largest_difference(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs)


def inner_product(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(float((np.asarray(a, np.float64) * b).sum()) for a, b in pairs)


def on_policy(learner, lora, rows):
    """The rows as if these very weights had sampled them; the groups are equally long, so their order stays."""
    own = iter(flat_logprobs(learner, lora, rows, share=True))
    done = []
    for row in rows:
        recorded = row.logprobs.copy()
        recorded[row.trained] = [next(own) for _ in row.trained]
        done.append(replace(row, logprobs=recorded))
    return done


def one_by_one(learner, lora, row, places):
    """Each of these tokens asked for alone: its row cut off behind it, no neighbour, no padding to speak of."""
    found = []
    for place in places:
        labels = np.full(place + 1, -100, np.int32)
        labels[place] = row.tokens[place]
        cut = replace(row, tokens=row.tokens[: place + 1], labels=labels, logprobs=row.logprobs[: place + 1])
        found.append(flat_logprobs(learner, lora, [replace(cut, advantages=row.advantages[: place + 1])], False)[0])
    return np.array(found)


def test_sharing_beginnings_and_padding_change_no_logprob(learner, lora):
    rows = rows_of(batch())
    (part,) = microbatches(rows, 36)
    assert len(part.prefix) == 32
    assert part.parent_lengths.max() > 0
    shared = flat_logprobs(learner, lora, rows, share=True)
    np.testing.assert_allclose(shared, flat_logprobs(learner, lora, rows, share=False), atol=2e-4)


def test_a_row_of_several_turns_trains_each_sampled_token_after_all_that_was_read_before_it(learner, lora):
    (row, *_) = rows_of(batch(groups=1))
    stretches = np.count_nonzero(np.diff(np.concatenate([[0], row.labels != -100])) == 1)
    assert stretches == 2
    whole = flat_logprobs(learner, lora, [row], share=True)
    ends = [0, 1, len(whole) - 2, len(whole) - 1]
    np.testing.assert_allclose(whole[ends], one_by_one(learner, lora, row, row.trained[ends]), atol=2e-4)


@pytest.mark.ci
def test_microbatches_shared_beginnings_and_padding_change_no_gradient(learner, lora):
    rows = rows_of(batch())
    whole = gradient_of(learner, lora, rows)
    largest = max(np.abs(entry).max() for entry in jax.tree.leaves(whole))
    assert largest_difference(whole, gradient_of(learner, lora, rows, share=False)) < 1e-3 * largest
    assert largest_difference(whole, gradient_of(learner, lora, rows, max_segments=5)) < 1e-3 * largest


@pytest.mark.ci
def test_rollouts_that_say_the_same_are_computed_once_and_each_is_trained(learner, lora):
    rows = rows_of(batch())
    rows += [replace(row, advantages=-2 * row.advantages) for row in rows[:3]]
    (part,) = microbatches(rows, 36)
    assert part.valid.sum() == sum(len(row.trained) for row in rows)
    assert len(part.segments) == len(microbatches(rows_of(batch()), 36)[0].segments)
    gradient = gradient_of(learner, lora, rows)
    largest = max(np.abs(entry).max() for entry in jax.tree.leaves(gradient))
    assert largest_difference(gradient, gradient_of(learner, lora, rows, share=False)) < 1e-3 * largest


def test_the_gradient_is_that_of_finite_differences(learner, lora):
    rows = on_policy(learner, lora, rows_of(batch()))
    (part,) = microbatches(rows, 36)
    tokens = float(part.valid.sum())
    gradient = gradient_of(learner, lora, rows)
    rng = np.random.default_rng(1)
    direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), lora)
    # On policy the importance weight is 1, a constant for the gradient: what is differentiated is -A log p. In double
    # precision, because in single precision a difference this small is mostly rounding.
    with jax.enable_x64(True):
        weights, start = jax.tree.map(lambda x: np.asarray(x, np.float64), (learner.model.weights, lora))

        def surrogate(distance):
            moved = jax.tree.map(lambda x, d: x + distance * d, start, direction)
            own = compiled_logprobs(learner.model.shape, weights, moved, learner.scale, part)
            return -float((np.asarray(own) * part.advantages * part.valid).sum()) / tokens

        slope = (surrogate(1e-6) - surrogate(-1e-6)) / 2e-6
    assert slope == pytest.approx(inner_product(gradient, direction), rel=5e-3)


@pytest.mark.ci
def test_steps_make_good_rollouts_likelier_and_bad_ones_less_likely(learner):
    state = learner.start()
    rows = on_policy(learner, state.lora, rows_of(batch()))
    signs = np.concatenate([row.advantages[row.trained] for row in rows])
    before = flat_logprobs(learner, state.lora, rows, share=True)
    for _ in range(4):
        state, figures = learner.train(state, rows)
    change = flat_logprobs(learner, state.lora, rows, share=True) - before
    assert change[signs > 0].mean() > 0.05
    assert change[signs < 0].mean() < -0.05
    assert figures.rows == len(rows)


def test_the_learning_rate_falls_in_a_straight_line_to_the_last_step(learner):
    settings = SETTINGS.model_copy(update={"steps": 5, "learning_rate": 1e-3, "final_learning_rate": 2e-4})
    rates = [Learner(learner.model, settings).learning_rate(step) for step in (1, 2, 3, 4, 5, 9)]
    assert rates == pytest.approx([1e-3, 8e-4, 6e-4, 4e-4, 2e-4, 2e-4])


def test_the_first_forward_pass_checks_the_pipeline(learner):
    rows = on_policy(learner, learner.start().lora, rows_of(batch()))
    _, right = learner.train(learner.start(), rows)
    assert right.logprob_difference_max < 1e-4
    assert right.ratio_mean == pytest.approx(1, abs=1e-4)
    assert right.clipped_share == 0
    _, wrong = Learner(learner.model, SETTINGS.model_copy(update={"control": "shifted"})).train(learner.start(), rows)
    assert wrong.logprob_difference_mean > 0.5


def test_the_shifted_control_asks_for_each_token_at_its_own_place():
    (row, *_) = rows_of(batch(groups=1))
    moved = shifted(row)
    np.testing.assert_array_equal(moved.tokens, row.tokens)
    kept = row.trained[row.trained + 1 < len(row.tokens)]
    np.testing.assert_array_equal(moved.trained, kept + 1)
    np.testing.assert_array_equal(moved.labels[kept + 1], row.tokens[kept])
    np.testing.assert_array_equal(moved.logprobs[kept + 1], row.logprobs[kept])


def test_the_shuffled_control_gives_the_advantages_of_a_group_to_the_wrong_rows():
    rows = rows_of(batch(groups=4))
    mixed = shuffled(rows, np.random.default_rng(0))
    values = [(row.group, round(float(row.advantages[row.trained[0]]), 4)) for row in rows]
    others = [(row.group, round(float(row.advantages[row.trained[0]]), 4)) for row in mixed]
    assert others != values
    assert sorted(others) == sorted(values)
    assert all((row.advantages[row.labels == -100] == 0).all() for row in mixed)


def test_groups_without_signal_and_stale_rows_are_counted_and_not_trained_on(learner):
    rng = np.random.default_rng(3)
    groups = [
        wire_group(rng, name="same", turns=2, scores=[1.0] * 4),
        wire_group(rng, name="old", turns=2, versions=[["m@2"], ["m@5"], ["m@5"], ["m@1"]]),
    ]
    state = replace(learner.start(), step=5)
    after, figures = learner.train(state, rows_of(groups))
    assert (figures.groups, figures.groups_without_signal, figures.rows_too_stale) == (2, 1, 2)
    assert (figures.staleness_max, figures.staleness_mean) == (4, 1.75)
    assert figures.rows == 2
    nothing, figures = learner.train(after, rows_of(groups[:1]))
    assert (nothing.step, nothing.updates, figures.rows) == (7, 1, 0)
    assert largest_difference(nothing.lora, after.lora) == 0


def test_an_adapter_is_read_back_as_it_was_written(learner, lora, tmp_path):
    write_adapter(tmp_path / "adapter.gguf", lora, 16.0, SETTINGS.first_layer)
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    layers = sorted({int(name.split(".")[1]) for name in tensors})
    back = {
        name: {part: np.stack([tensors[f"blk.{i}.{name}.weight.lora_{part}"] for i in layers]) for part in ("a", "b")}
        for name in LINEARS
    }
    assert largest_difference(back, lora) == 0
    assert (reader.fields["adapter.lora.alpha"].contents(), layers[0]) == (16.0, SETTINGS.first_layer)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter.gguf"]


def test_going_on_from_a_checkpoint_is_never_having_stopped(learner, tmp_path):
    batches = [rows_of(batch(seed=seed)) for seed in (0, 0, 0)]
    state = learner.start()
    for rows in batches:
        state, _ = learner.train(state, rows)
        save_checkpoint(tmp_path, state, keep=2)
        if state.step == 2:
            resumed = load_checkpoint(tmp_path, learner.start())
    assert resumed is not None
    resumed, _ = learner.train(resumed, batches[2])
    assert (resumed.step, resumed.updates) == (3, 3)
    assert largest_difference(resumed.lora, state.lora) == 0
    assert largest_difference(resumed.adam.square, state.adam.square) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step-0002.npz", "step-0003.npz"]


def test_a_checkpoint_of_another_rank_is_refused(learner, tmp_path):
    save_checkpoint(tmp_path, learner.start(), keep=1)
    other = Learner(learner.model, SETTINGS.model_copy(update={"rank": 4}))
    with pytest.raises(CheckpointMismatch, match="resume with the rank, first_layer and model"):
        load_checkpoint(tmp_path, other.start())


def test_a_first_layer_that_leaves_nothing_to_learn_is_refused(tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedModel, match="has 3 layers: none would learn"):
        load_model(path, 3)
