"""Candidate sampling against TensorFlow itself: losses, gradients, hits and expected counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait import nn

tf = pytest.importorskip("tensorflow")

CLASSES, DIM, BATCH, SAMPLED = 40, 5, 6, 15


@pytest.fixture
def given():
    rng = np.random.default_rng(0)
    return {
        "weights": rng.normal(size=(CLASSES, DIM)).astype(np.float32),
        "biases": rng.normal(size=CLASSES).astype(np.float32),
        "inputs": rng.normal(size=(BATCH, DIM)).astype(np.float32),
        "labels": np.stack([rng.permutation(CLASSES)[:3] for _ in range(BATCH)]).astype(np.int64),
    }


@pytest.mark.parametrize("name", ["sampled_softmax_loss", "nce_loss"])
@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("num_true", [1, 3])
def test_losses_and_gradients_are_tensorflows(given, name, remove, num_true):
    given["labels"] = given["labels"][:, :num_true]
    torch.manual_seed(num_true)
    drawn = nn.log_uniform_candidate_sampler(torch.from_numpy(given["labels"]), num_true, SAMPLED, True, CLASSES)
    options = {"num_sampled": SAMPLED, "num_classes": CLASSES, "num_true": num_true, "remove_accidental_hits": remove}
    ours = {key: torch.from_numpy(value).requires_grad_(key != "labels") for key, value in given.items()}
    loss = getattr(nn, name)(**ours, **options, sampled_values=drawn)
    loss.sum().backward()
    theirs = {key: tf.Variable(value) for key, value in given.items()}
    with tf.GradientTape() as tape:
        wanted = getattr(tf.compat.v1.nn, name)(
            **theirs, **options, sampled_values=tuple(tf.constant(one.numpy()) for one in drawn)
        )
    keys = ["weights", "biases", "inputs"]
    gradients = tape.gradient(wanted, [theirs[key] for key in keys])
    np.testing.assert_allclose(loss.detach().numpy(), wanted.numpy(), rtol=2e-5)
    for key, gradient in zip(keys, gradients, strict=True):
        dense = tf.convert_to_tensor(gradient).numpy()
        np.testing.assert_allclose(ours[key].grad.numpy(), dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["uniform_candidate_sampler", "log_uniform_candidate_sampler"])
def test_expected_counts_are_tensorflows(given, name):
    labels = given["labels"]
    theirs = getattr(tf.random, name)(labels, 3, 8, False, CLASSES)
    ours = getattr(nn, name)(torch.from_numpy(labels), 3, 8, False, CLASSES)
    np.testing.assert_allclose(ours.true_expected_count.numpy(), theirs[1].numpy(), rtol=1e-6)


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("reserved", [0, 3])
def test_fixed_unigrams_are_dealt_out_as_by_tensorflow(shards, reserved):
    counts = [float(number) for number in range(1, 13)]
    for shard in range(shards):
        sizes = [size for size in range(1, 17) if _fits(counts, size, reserved, shards, shard)]
        (size,) = sizes
        labels = np.arange(size)[:, None]
        options = {
            "unigrams": counts,
            "num_reserved_ids": reserved,
            "num_shards": shards,
            "shard": shard,
            "distortion": 0.7,
        }
        theirs = tf.random.fixed_unigram_candidate_sampler(labels, 1, 2, False, size, **options)
        ours = nn.fixed_unigram_candidate_sampler(torch.from_numpy(labels), 1, 2, False, size, **options)
        np.testing.assert_allclose(ours.true_expected_count.numpy(), theirs[1].numpy(), rtol=1e-5)


def _fits(counts, size, reserved, shards, shard):
    labels = torch.zeros(1, 1, dtype=torch.int64)
    options = {"unigrams": counts, "num_reserved_ids": reserved, "num_shards": shards, "shard": shard}
    try:
        nn.fixed_unigram_candidate_sampler(labels, 1, 1, False, size, **options)
    except ValueError:
        return False
    return True


def test_accidental_hits_are_tensorflows(given):
    sampled = np.arange(0, CLASSES, 3)
    theirs = tf.nn.compute_accidental_hits(given["labels"], sampled, 3)
    ours = nn.compute_accidental_hits(torch.from_numpy(given["labels"]), torch.from_numpy(sampled), 3)
    order = np.lexsort((ours.ids.numpy(), ours.indices.numpy()))
    their_order = np.lexsort((theirs[1].numpy(), theirs[0].numpy()))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.numpy()[order], other.numpy()[their_order])
