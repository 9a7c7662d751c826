from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.engine import metrics
from plait.engine.metrics import Measurement, Metric
from plait.errors import FunctionError, MismatchError

Batch = dict[str, Tensor]


# References: loops over rows and pairs, in NumPy and Python numbers alone.


def reference_mean(b):
    return _ratio(sum(v * w for v, w in zip(b["scores"], b["weights"])), sum(b["weights"]))


def reference_accuracy(b):
    right = [w for row, label, w in zip(b["logits"], b["classes"], b["weights"]) if np.argmax(row) == label]
    return _ratio(sum(right), sum(b["weights"]))


def reference_top_k(b, k=2):
    right = [label in np.argsort(-row)[:k] for row, label in zip(b["logits"], b["classes"])]
    return _ratio(sum(right), len(right))


def reference_auc(labels, scores, weights):
    won = total = 0.0
    for i, j in itertools.product(np.flatnonzero(labels), np.flatnonzero(labels == 0)):
        pair = weights[i] * weights[j]
        total += pair
        won += pair * (1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0)
    return _ratio(won, total)


def reference_group_auc(b):
    won = rows = 0.0
    for group in set(b["groups"].tolist()):
        chosen = b["groups"] == group
        area = reference_auc(b["labels"][chosen], b["scores"][chosen], np.ones(chosen.sum()))
        if not math.isnan(area):
            won += area * chosen.sum()
            rows += chosen.sum()
    return _ratio(won, rows)


def reference_precision(b):
    rows = [(y, w) for y, p, w in zip(b["labels"], b["scores"], b["weights"]) if p > 0.5]
    return _ratio(sum(w for y, w in rows if y), sum(w for _, w in rows))


def reference_recall(b):
    rows = [(p, w) for y, p, w in zip(b["labels"], b["scores"], b["weights"]) if y]
    return _ratio(sum(w for p, w in rows if p > 0.5), sum(w for _, w in rows))


def reference_rmse(b):
    squares = [w * (y - p) ** 2 for y, p, w in zip(b["labels"], b["scores"], b["weights"])]
    return math.sqrt(_ratio(sum(squares), sum(b["weights"])))


def reference_log_loss(b):
    losses = [
        -w * math.log(min(max(p if y else 1 - p, 1e-7), 1 - 1e-7))
        for y, p, w in zip(b["labels"], b["scores"], b["weights"])
    ]
    return _ratio(sum(losses), sum(b["weights"]))


def reference_class_log_loss(b):
    losses = [-math.log(max(row[c], 1e-7)) for row, c in zip(_softmax(b["logits"]), b["classes"])]
    return _ratio(sum(losses), len(losses))


def _ratio(part, whole):
    return part / whole if whole else math.nan


def _softmax(logits):
    powers = np.exp(logits)
    return powers / powers.sum(-1, keepdims=True)


def _binned(scores):
    return np.maximum(np.ceil(scores * 199) - 1, 0)


CASES: dict[str, tuple[Callable[[Batch], Measurement], Callable[[dict[str, np.ndarray]], float]]] = {
    "mean": (lambda b: metrics.mean(b["scores"], b["weights"]), reference_mean),
    "accuracy": (lambda b: metrics.accuracy(b["classes"], b["logits"], b["weights"]), reference_accuracy),
    "top_k": (lambda b: metrics.top_k(b["classes"], b["logits"], k=2), reference_top_k),
    "auc": (
        lambda b: metrics.auc(b["labels"], b["scores"], b["weights"]),
        lambda b: reference_auc(b["labels"], _binned(b["scores"]), b["weights"]),
    ),
    "exact_auc": (
        lambda b: metrics.auc(b["labels"], b["scores"], b["weights"], exact=True),
        lambda b: reference_auc(b["labels"], b["scores"], b["weights"]),
    ),
    "exact_auc_unweighted": (
        lambda b: metrics.auc(b["labels"], b["scores"], exact=True),
        lambda b: reference_auc(b["labels"], b["scores"], np.ones(len(b["labels"]))),
    ),
    "group_auc": (lambda b: metrics.group_auc(b["labels"], b["scores"], b["groups"]), reference_group_auc),
    "precision": (lambda b: metrics.precision(b["labels"], b["scores"], b["weights"]), reference_precision),
    "recall": (lambda b: metrics.recall(b["labels"], b["scores"], b["weights"]), reference_recall),
    "rmse": (lambda b: metrics.rmse(b["labels"], b["scores"], b["weights"]), reference_rmse),
    "log_loss": (lambda b: metrics.log_loss(b["labels"], b["scores"], b["weights"]), reference_log_loss),
    "class_log_loss": (
        lambda b: metrics.log_loss(b["classes"], b["logits"].softmax(-1)),
        reference_class_log_loss,
    ),
}
every_case = pytest.mark.parametrize("name", CASES)


def make_batch(
    rows: int, seed: int = 0, levels: int = 12, label_dtype: torch.dtype = torch.int64, positives: float = 0.4
) -> Batch:
    """Few levels of score make ties; the logits of a row are all different, for the order of ties is torch's."""
    random = np.random.default_rng(seed)
    return {
        "labels": torch.from_numpy(random.random(rows) < positives).to(label_dtype),
        "scores": torch.from_numpy(random.integers(0, levels + 1, rows) / levels),
        "weights": torch.from_numpy(random.integers(1, 5, rows) / 4),
        "groups": torch.from_numpy(random.integers(0, 5, rows)),
        "classes": torch.from_numpy(random.integers(0, 4, rows)),
        "logits": torch.from_numpy(random.permuted(np.tile(np.arange(4.0), (rows, 1)), axis=1)),
    }


def to_numpy(batch: Batch) -> dict[str, np.ndarray]:
    numbers = {name: column.numpy() for name, column in batch.items()}
    return numbers | {"labels": numbers["labels"].astype(float)}


def cut(batch: Batch, at: list[int]) -> list[Batch]:
    edges = [0, *sorted(at), len(batch["labels"])]
    return [{name: column[a:b] for name, column in batch.items()} for a, b in itertools.pairwise(edges)]


def fed(measure: Callable[[Batch], Measurement], batches: list[Batch]) -> Metric:
    metric = measure(batches[0]).create()
    for batch in batches:
        metric.update(*measure(batch).args)
    return metric


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))


@every_case
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 25),
    seed=st.integers(0, 2**31),
    levels=st.integers(1, 40),
    label_dtype=st.sampled_from([torch.int64, torch.int32, torch.bool, torch.float32]),
    positives=st.sampled_from([0.0, 0.4, 1.0]),
    cuts=st.lists(st.floats(0, 1), max_size=4),
)
def test_equals_the_reference_however_it_is_cut(name, rows, seed, levels, label_dtype, positives, cuts):
    measure, reference = CASES[name]
    batch = make_batch(rows, seed, levels, label_dtype, positives)
    result = fed(measure, cut(batch, [int(at * rows) for at in cuts])).result()
    assert result.shape == ()
    assert result.item() == pytest.approx(reference(to_numpy(batch)), rel=1e-12, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("name", ["accuracy", "top_k", "auc", "exact_auc", "group_auc", "precision", "recall"])
def test_counts_are_exact_however_they_are_cut(name):
    batch = make_batch(200)
    whole = fed(CASES[name][0], [batch]).result()
    parts = fed(CASES[name][0], cut(batch, [1, 1, 17, 90])).result()
    assert same_bits(whole, parts)


@every_case
def test_a_saved_state_goes_on_bit_for_bit(name):
    measure = CASES[name][0]
    parts = [{**b, "scores": b["scores"] / 3} for b in cut(make_batch(90), [30, 60])]
    straight = fed(measure, parts)
    saved = fed(measure, parts[:2]).state_dict()
    again = measure(parts[0]).create()
    again.load_state_dict(saved)
    again.update(*measure(parts[2]).args)
    assert same_bits(straight.result(), again.result())
    assert straight.state_dict().keys() == again.state_dict().keys()
    for key, value in straight.state_dict().items():
        assert same_bits(value, again.state_dict()[key])


@every_case
def test_merge_of_workers_equals_the_whole(name):
    measure = CASES[name][0]
    batch = make_batch(80)
    halves = [fed(measure, [part]).state_dict() for part in cut(batch, [31])]
    merged = fed(measure, [make_batch(7, seed=5)])  # what it held before is replaced
    merged.merge(halves)
    assert merged.result().item() == pytest.approx(fed(measure, [batch]).result().item(), rel=1e-12)
    merged.merge([])
    assert merged.result().isnan()


@every_case
def test_a_state_is_a_copy(name):
    measure = CASES[name][0]
    metric = fed(measure, [make_batch(40)])
    before, state = metric.result().clone(), metric.state_dict()
    for value in state.values():
        assert value.is_contiguous()
        value.fill_(0)
    assert same_bits(metric.result(), before)
    state = fed(measure, [make_batch(40)]).state_dict()
    metric.load_state_dict(state)
    for value in state.values():
        value.fill_(0)
    assert same_bits(metric.result(), before)


@every_case
def test_reset_starts_anew(name):
    measure = CASES[name][0]
    metric = fed(measure, [make_batch(40, seed=1)])
    metric.reset()
    assert metric.result().isnan()
    metric.update(*measure(make_batch(40)).args)
    assert same_bits(metric.result(), fed(measure, [make_batch(40)]).result())


@every_case
def test_keeps_nothing_of_what_it_was_given(name):
    measure = CASES[name][0]
    batch = make_batch(40)
    metric = fed(measure, [batch])
    for column in batch.values():
        column.zero_()
    assert same_bits(metric.result(), fed(measure, [make_batch(40)]).result())


@every_case
def test_waits_for_no_value(name, monkeypatch):
    def refuse(*_):
        raise AssertionError("a value was read")

    measure = CASES[name][0]
    batch = make_batch(20)
    for reader in ("item", "__bool__", "__int__", "__float__", "__index__", "tolist", "numpy", "cpu", "nonzero"):
        monkeypatch.setattr(Tensor, reader, refuse)
    result = fed(measure, [batch, batch]).result()
    monkeypatch.undo()
    assert result.item() == pytest.approx(fed(measure, [batch]).result().item())


@every_case
def test_leaves_no_graph(name):
    measure = CASES[name][0]
    batch = make_batch(20)
    for column in ("scores", "weights", "logits"):
        batch[column].requires_grad_()
    metric = fed(measure, [batch])
    assert not metric.result().requires_grad
    assert not any(value.requires_grad for value in metric.state_dict().values())


@every_case
def test_a_metric_made_in_inference_mode_works_outside(name):
    measure = CASES[name][0]
    batch = make_batch(20)
    with torch.inference_mode():
        metric = fed(measure, [batch])
    metric.update(*measure(batch).args)
    metric.reset()
    metric.update(*measure(batch).args)
    assert same_bits(metric.result(), fed(measure, [batch]).result())


def test_mean_of_scalars_and_numbers():
    metric = metrics.mean(torch.tensor(0.0)).create()
    for value in (torch.tensor(1.5), 2.5, 2, torch.tensor(True)):
        metric.update(*metrics.mean(value).args)
    assert metric.result().item() == 7 / 4
    assert metric.result().dtype == torch.float64


def test_mean_takes_few_calls():
    calls = []

    class Count(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func.__name__)
            return func(*args, **(kwargs or {}))

    value = torch.tensor(1.0, requires_grad=True) * 2
    metric = metrics.mean(value).create()
    with Count():
        metric.update(*metrics.mean(value).args)
    assert [call for call in calls if call != "dim"] == ["detach", "add_", "numel", "add_"]


def test_half_precision_is_summed_in_double():
    values = torch.full((5000,), 0.1, dtype=torch.bfloat16)
    metric = metrics.mean(values).create()
    metric.update(values)
    assert metric.result().item() == pytest.approx(values[0].item(), rel=1e-12)


def test_weights_broadcast_over_rows():
    values, weights = torch.arange(6.0).reshape(2, 3), torch.tensor([[1.0], [3.0]])
    metric = metrics.mean(values, weights).create()
    metric.update(values, weights)
    assert metric.result().item() == (3 + 3 * 12) / 12
    for exact in (False, True):
        scores, labels = values / 6, torch.tensor([[0, 1, 0], [1, 0, 1]])
        narrow = metrics.auc(labels, scores, weights, exact=exact)
        wide = metrics.auc(labels, scores, weights.expand(2, 3).clone(), exact=exact)
        assert same_bits(*(result_of(m) for m in (narrow, wide)))


def result_of(measurement: Measurement) -> Tensor:
    metric = measurement.create()
    metric.update(*measurement.args)
    return metric.result()


def test_accuracy_takes_classes_and_scores_of_any_dimensions():
    labels, scores = torch.tensor([[1, 0], [1, 1]]), torch.rand(2, 2, 3)
    assert result_of(metrics.accuracy(labels, torch.tensor([[1, 0], [0, 1]]))).item() == 0.75
    assert result_of(metrics.accuracy(labels.bool(), torch.tensor([[1.0, 1.0], [1.0, 0.0]]))).item() == 0.5
    assert torch.equal(
        result_of(metrics.accuracy(labels, scores)), result_of(metrics.accuracy(labels, scores.argmax(-1)))
    )


def test_top_k_does_not_mind_a_label_that_is_no_class():
    scores = torch.tensor([[0.1, 0.9, 0.5]] * 3)
    assert result_of(metrics.top_k(torch.tensor([-100, 2, 7]), scores, k=2)).item() == pytest.approx(1 / 3)


def test_precision_and_recall_take_decisions_and_probabilities():
    labels, chances = torch.tensor([1, 1, 0, 0, 1]), torch.tensor([0.9, 0.4, 0.8, 0.1, 0.7])
    for predictions in (chances, chances > 0.5, (chances > 0.5).int(), (chances > 0.5).double()):
        assert result_of(metrics.precision(labels, predictions)).item() == pytest.approx(2 / 3)
        assert result_of(metrics.recall(labels, predictions)).item() == pytest.approx(2 / 3)
    assert result_of(metrics.recall(labels, chances, threshold=0.3)).item() == 1.0
    assert result_of(metrics.precision(labels, chances, threshold=0.95)).isnan()


def test_log_loss_holds_probabilities_off_the_ends():
    worst = metrics.log_loss(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), epsilon=1e-3)
    assert result_of(worst).item() == pytest.approx(-math.log(1e-3))


@pytest.mark.parametrize("beyond", [-0.1, 1.1])
def test_binned_auc_refuses_what_are_no_probabilities_when_it_is_checked(beyond):
    labels, scores = torch.tensor([0, 1]), torch.tensor([0.5, beyond])
    with pytest.raises(FunctionError, match=r"metrics.auc: predictions go beyond 0 and 1.*sigmoid\(\), or exact=True"):
        metrics.auc(labels, scores).checked()
    assert metrics.auc(labels, scores, exact=True).checked().check is None


def test_binned_auc_takes_the_whole_range_and_no_rows_at_all():
    for scores in (torch.tensor([0.0, 1.0]), torch.zeros(0)):
        measured = metrics.auc(torch.ones(len(scores)), scores)
        assert measured.checked() is measured


def test_binned_auc_at_the_ends_and_outside():
    labels, scores = torch.tensor([0, 1, 0, 1]), torch.tensor([-3.0, 1.0, 0.0, math.inf])
    assert result_of(metrics.auc(labels, scores)).item() == 1.0
    assert result_of(metrics.auc(labels, torch.rand(4), num_thresholds=2)).item() == 0.5


def test_a_prediction_on_a_threshold_is_not_above_it():
    # the thresholds are 0, 0.5 and 1: the first pair is on one side of 0.5, the second is not
    labels = torch.tensor([0, 1])
    assert result_of(metrics.auc(labels, torch.tensor([0.4, 0.5]), num_thresholds=3)).item() == 0.5
    assert result_of(metrics.auc(labels, torch.tensor([0.5, 0.6]), num_thresholds=3)).item() == 1.0


@pytest.mark.parametrize("exact", [False, True])
def test_auc_of_a_score_that_is_no_number_is_nan(exact):
    labels, scores = torch.tensor([0, 1, 1]), torch.tensor([0.1, math.nan, 0.9])
    assert result_of(metrics.auc(labels, scores, exact=exact)).isnan()
    assert result_of(metrics.gauc(labels, scores, labels)).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_exact_auc_takes_any_dtype_of_score(dtype):
    labels, scores = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, 1])
    assert result_of(metrics.auc(labels, scores.to(dtype), exact=True)).item() == 0.5
    assert result_of(metrics.gauc(labels, scores.to(dtype), torch.zeros_like(labels))).item() == 0.5


def test_labels_of_minus_one_are_negative():
    scores = torch.tensor([0.2, 0.8, 0.6, 0.7])
    signs, bits = torch.tensor([-1, 1, -1, 1]), torch.tensor([0, 1, 0, 1])
    assert same_bits(result_of(metrics.auc(signs, scores)), result_of(metrics.auc(bits, scores)))
    assert same_bits(result_of(metrics.recall(signs, scores)), result_of(metrics.recall(bits, scores)))


def test_group_auc_of_many_groups_is_fast_and_right():
    random = torch.Generator().manual_seed(0)
    groups = torch.arange(20_000).repeat(2)
    scores = torch.rand(40_000, generator=random)
    labels = torch.arange(2).repeat_interleave(20_000)
    expected = (scores[20_000:] > scores[:20_000]).double().mean()
    assert result_of(metrics.gauc(labels, scores, groups)).item() == pytest.approx(expected.item(), abs=1e-12)


def test_latest_is_the_last_value_seen():
    measurement = metrics.latest(torch.tensor([2.0], requires_grad=True) * 3)
    metric = measurement.create()
    assert metric.result().isnan()
    assert metric.state_dict() == {}
    metric.update(*measurement.args)
    assert metric.result().shape == ()
    assert not metric.result().requires_grad
    assert metric.value is measurement.args[0]
    state = metric.state_dict()
    metric.update(*metrics.latest(0.25).args)
    assert metric.result().item() == 0.25
    metric.load_state_dict(state)
    assert metric.result().item() == 6.0
    state["value"].zero_()
    assert metric.result().item() == 6.0
    metric.merge([{"value": torch.tensor(1.0)}, {"value": torch.tensor(2.0)}, {}])
    assert metric.result().item() == 2.0
    metric.reset()
    assert metric.result().isnan()


def test_a_measurement_unpacks_like_tensorflow():
    measurement = metrics.mean(torch.ones(3))
    value, update_op = measurement
    assert value is measurement
    assert update_op is measurement


def test_aliases_and_names():
    assert metrics.in_top_k is metrics.top_k
    assert metrics.rmse is metrics.root_mean_squared_error
    assert metrics.gauc is metrics.group_auc
    assert metrics.__all__ == sorted(metrics.__all__)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: metrics.auc(zeros(3), zeros(3, 1)), ["auc", "[3]", "[3, 1]", "same shape"]),
        (lambda: metrics.auc(zeros(3), zeros(3), zeros(2)), ["auc", "[2]", "[3]", "weights"]),
        (lambda: metrics.auc(zeros(3), zeros(3), num_thresholds=1), ["auc", "num_thresholds is 1", "2 or more"]),
        (lambda: metrics.mean(zeros(), zeros(3)), ["mean", "[3]", "[]", "weights"]),
        (lambda: metrics.mean([1.0]), ["mean", "list", "torch.Tensor"]),
        (lambda: metrics.mean(zeros(2), 1.0), ["mean", "weights", "float", "torch.Tensor"]),
        (lambda: metrics.latest(zeros(2)), ["latest", "[2]", "one number"]),
        (lambda: metrics.accuracy(zeros(3), zeros(3, 1)), ["accuracy", "[3, 1]", "[3] or [3, classes]"]),
        (lambda: metrics.accuracy(zeros(3), zeros(2, 4)), ["accuracy", "[2, 4]", "[3] or [3, classes]"]),
        (lambda: metrics.accuracy(zeros(3, 1), zeros(3)), ["accuracy", "[3, 1]", "[3]"]),
        (lambda: metrics.accuracy(zeros(2), zeros()), ["accuracy", "[2]", "[]"]),
        (lambda: metrics.accuracy(zeros(), zeros(3, 4)), ["accuracy", "[3, 4]", "[classes]"]),
        (lambda: metrics.top_k(zeros(3), zeros(3)), ["top_k", "shape [3, classes]"]),
        (lambda: metrics.top_k(zeros(3), zeros(3, 4)), ["top_k", "k is 5", "1 to 4"]),
        (lambda: metrics.precision(zeros(3), zeros(4)), ["precision", "[3]", "[4]"]),
        (lambda: metrics.recall(zeros(3), zeros(4)), ["recall", "[3]", "[4]"]),
        (lambda: metrics.rmse(zeros(3), zeros(3, 1)), ["root_mean_squared_error", "[3]", "[3, 1]"]),
        (lambda: metrics.log_loss(zeros(3), zeros(3, 1)), ["log_loss", "[3, 1]", "2 classes"]),
        (lambda: metrics.log_loss(zeros(3), zeros(3, 2)), ["log_loss", "torch.float32", "integer"]),
        (lambda: metrics.group_auc(zeros(3), zeros(3), zeros(2)), ["group_auc", "groups", "[2]"]),
        (lambda: metrics.group_auc(zeros(3), [0.5], zeros(3)), ["group_auc", "predictions", "list"]),
    ],
)
def test_a_wrong_shape_is_named(call, parts):
    with pytest.raises(FunctionError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_a_state_of_another_metric_is_refused():
    binned = metrics.auc(zeros(3), zeros(3)).create()
    with pytest.raises(MismatchError, match=r"\[2, 199\].*\[2, 99\]"):
        binned.load_state_dict(metrics.auc(zeros(3), zeros(3), num_thresholds=100).create().state_dict())
    with pytest.raises(MismatchError, match=r"'sums'.*\['positive', 'scores', 'weights'\]"):
        binned.load_state_dict(metrics.auc(zeros(3), zeros(3), exact=True).create().state_dict())
    with pytest.raises(MismatchError, match="'groups'"):
        metrics.gauc(zeros(3), zeros(3), zeros(3)).create().merge([{"scores": zeros(1), "positive": zeros(1)}])


def test_state_lives_where_the_tensors_are():
    for measurement in (metrics.mean(zeros(3).to("meta")), metrics.auc(zeros(3).to("meta"), zeros(3).to("meta"))):
        assert measurement.create().state_dict()["sums"].device.type == "meta"
        assert measurement.create().result().device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_case
def test_no_wait_and_the_same_bits_on_a_gpu(name):
    measure = CASES[name][0]
    batch = {key: column.cuda() for key, column in make_batch(5000).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype, once
        torch.cuda.set_sync_debug_mode("error")
    try:
        results = [fed(measure, [batch, batch]).result() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len({result.item() for result in results}) == 1
