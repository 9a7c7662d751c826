"""Each row is in each batch by itself, with the same probability; the draws are the same in every run."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plait.data import PoissonSource, Stream
from plait.data.parts import is_part, part_of
from plait.data.sources import Source
from plait.efl import Model, Sample, optimizer_fn, procedure_fn
from plait.errors import ConfigError, DataError, OutOfRangeError


def numbers(rows, batch_size, **settings):
    return PoissonSource({"x": torch.arange(rows)}, batch_size, **{"seed": 0, **settings})


def drawn(source, epoch=0, start=0):
    return [batch["x"].tolist() for batch in source.batches(epoch, start)]


def test_it_is_a_source_that_says_how_it_samples():
    source = numbers(1000, 30, num_epochs=2)
    assert isinstance(source, Source)
    assert (source.rate, source.rows, source.expected, source.batch_size) == (0.03, 1000, 30, 30)
    assert (source.steps, source.num_epochs, source.seekable, source.is_part) == (33, 2, True, False)
    assert len(drawn(source)) == 33
    assert len(drawn(numbers(1000, 30, steps_per_epoch=7))) == 7


def test_every_row_is_drawn_with_the_same_probability_in_every_batch():
    """Of 50 rows and 4,000 batches: the counts are binomial, and so are the sizes."""
    rows, steps, rate = 50, 4000, 0.2
    seen = torch.zeros(steps, rows)
    for number, batch in enumerate(drawn(numbers(rows, 10, steps_per_epoch=steps, seed=3))):
        seen[number, batch] = 1
        assert len(set(batch)) == len(batch)
    variance = rate * (1 - rate)
    row_scores = (seen.mean(0) - rate) / math.sqrt(variance / steps)
    batch_scores = (seen.mean(1) - rate) / math.sqrt(variance / rows)
    for scores, count in ((row_scores, rows), (batch_scores, steps)):
        assert abs(scores.mean()) < 4 / math.sqrt(count)
        assert abs(scores.var() - 1) < 4 * math.sqrt(2 / count)
    assert abs(row_scores).max() < 4.5


def test_rows_are_drawn_by_themselves():
    """Neighbours in a batch, and a row in batches that follow each other, know nothing of each other."""
    seen = torch.zeros(4000, 50)
    for number, batch in enumerate(drawn(numbers(50, 10, steps_per_epoch=4000, seed=4))):
        seen[number, batch] = 1
    scores = (seen - 0.2) / 0.4
    for one, other in ((scores[:, 1:], scores[:, :-1]), (scores[1:], scores[:-1]), (scores[:, 2:], scores[:, :-2])):
        assert abs((one * other).mean()) < 4 / math.sqrt(one.numel())


def test_sizes_differ_and_may_be_nothing():
    sizes = {len(batch) for batch in drawn(numbers(40, 1, steps_per_epoch=400))}
    assert {0, 1, 2, 3} <= sizes


def test_fields_stay_together_and_keep_their_names_and_kinds():
    x = torch.randn(30, 4)
    for batch in PoissonSource({"x": x, "at": torch.arange(30)}, 5).batches(0, 0):
        assert torch.equal(batch["x"], x[batch["at"]])
    for pair in PoissonSource((x, torch.arange(30).numpy()), 5, seed=2).batches(1, 3):
        assert isinstance(pair, tuple)
        assert torch.equal(pair[0], x[pair[1]])


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 9), st.integers(0, 3), st.integers(0, 12))
def test_from_any_place_on_it_is_the_same(rows, batch_size, steps, epoch, start):
    source = numbers(rows, min(batch_size, rows), steps_per_epoch=steps, seed=rows)
    again = numbers(rows, min(batch_size, rows), steps_per_epoch=steps, seed=rows)
    whole = drawn(source, epoch)
    assert len(whole) == steps
    assert drawn(again, epoch, start) == whole[start:]
    assert all(batch == sorted(set(batch)) and all(0 <= row < rows for row in batch) for batch in whole)


def test_epochs_and_seeds_differ():
    assert drawn(numbers(100, 20)) != drawn(numbers(100, 20), epoch=1)
    assert drawn(numbers(100, 20)) != drawn(numbers(100, 20, seed=1))


def test_without_a_seed_nobody_has_the_same_draws():
    one, other = (numbers(1000, 100, seed=None) for _ in range(2))
    assert drawn(one) != drawn(other)
    assert one.draws() != other.draws()
    assert one.fingerprint() == other.fingerprint()
    assert one.fingerprint()["seed"] is None
    assert one.uses(0, 9) > 1
    other.uses(0, 5)
    other.kept_seed = one.kept_seed
    assert drawn(one) == drawn(other)
    assert one.draws() == other.draws()
    assert one.uses(0, 9) == other.uses(0, 9)


def test_a_seed_that_was_given_stays():
    source = numbers(1000, 100, seed=3)
    assert source.kept_seed is None
    source.kept_seed = "4"
    assert drawn(source) == drawn(numbers(1000, 100, seed=3))


def test_every_bit_of_a_seed_counts():
    seeds = [5, 5 + 2**32, 5 + 2**63, 5 + 2**127, -5]
    assert len({str(drawn(numbers(100, 20, seed=seed))) for seed in seeds}) == len(seeds)
    assert len({numbers(100, 20, seed=seed).draws() for seed in seeds}) == len(seeds)


def test_a_rate_of_one_gives_all_rows():
    assert drawn(numbers(7, 7, steps_per_epoch=3)) == [list(range(7))] * 3


def test_a_batch_may_be_written_into():
    source = numbers(20, 10)
    first = drawn(source)
    for batch in source.batches(0, 0):
        batch["x"].fill_(-1)
    assert drawn(source) == first


@pytest.mark.parametrize("count", [2, 3, 5])
def test_parts_together_are_the_whole_and_share_no_row(count):
    source = numbers(101, 20, seed=1)
    parts = [part_of(source, index, count, together=True) for index in range(count)]
    assert all(is_part(part) for part in parts)
    for index, part in enumerate(parts):
        assert all(row % count == index for batch in drawn(part, 1) for row in batch)
        assert part_of(part, 0, 2, together=True) is part
    joined = [sorted(sum(batches, [])) for batches in zip(*(drawn(part, 1) for part in parts), strict=True)]
    assert joined == drawn(source, 1)
    assert {part.rate for part in parts} == {source.rate}
    assert sum(part.rows for part in parts) == source.rows
    assert sum(part.expected for part in parts) == pytest.approx(source.expected)
    assert drawn(parts[1], 1, 3) == drawn(parts[1], 1)[3:]


def test_one_worker_has_the_source_itself():
    source = numbers(10, 2)
    assert part_of(source, 0, 1, together=True) is source


def most_drawn(source, epoch, step):
    counts = torch.zeros(source.all_rows)
    for number in range(epoch + 1):
        for batch in drawn(source, number)[: step + 1 if number == epoch else None]:
            counts[batch] += 1
    return int(counts.max())


def test_the_most_often_that_a_row_was_drawn():
    source = numbers(40, 4, steps_per_epoch=6, seed=9)
    for epoch in range(3):
        for step in range(6):
            assert source.uses(epoch, step) == source.uses(epoch, step) == most_drawn(numbers_like(source), epoch, step)


def numbers_like(source):
    return numbers(source.all_rows, source.batch_size, steps_per_epoch=source.steps, seed=source.seed)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=6))
def test_uses_may_be_asked_for_in_any_order(places):
    source, another = (numbers(30, 3, steps_per_epoch=5, seed=2) for _ in range(2))
    for epoch, step in places:
        assert source.uses(epoch, step) == most_drawn(another, epoch, step)


def test_uses_are_those_of_all_workers():
    source = numbers(40, 10, seed=5)
    assert {source.divided(index, 3).uses(1, 2) for index in range(3)} == {source.uses(1, 2)}


def test_of_nothing_there_are_no_uses():
    source = numbers(1000, 1, steps_per_epoch=1, seed=next(seed for seed in range(99) if not first(1000, seed)))
    assert source.uses(0, 0) == 0


def first(rows, seed):
    return drawn(numbers(rows, 1, steps_per_epoch=1, seed=seed))[0]


def test_the_fingerprint_tells_what_matters():
    facts = numbers(100, 10, seed=3).fingerprint()
    assert facts == json.loads(json.dumps(facts))
    assert facts == {"kind": "poisson", "fields": ["x"], "rows": 100, "rate": 0.1, "steps": 10, "seed": 3}
    assert numbers(100, 10, seed=3).divided(1, 2).fingerprint() == {**facts, "index": 1, "count": 2}


def test_a_stream_reads_batches_without_rows_and_goes_on_where_it_was():
    def stream():
        return Stream(PoissonSource({"x": torch.arange(12), "y": torch.zeros(12, 3)}, 1, seed=1, num_epochs=2))

    one, sizes, states = stream(), [], []
    for _ in range(12):
        states.append(one.state_dict())
        sample = one.read()
        sizes.append(sample.batch_size)
        assert sample.y.shape == (sizes[-1], 3)
        one.commit()
    assert 0 in sizes
    with pytest.raises(OutOfRangeError, match="pass 0 is over after 12 batches"):
        one.read()
    another = stream()
    another.load_state_dict(states[5])
    assert another.read().batch_size == sizes[5]


def test_groups_of_columns_of_a_batch_without_rows():
    source = PoissonSource({"a": torch.arange(9.0), "b": torch.ones(9, 2)}, 1, seed=1)
    stream, shapes = Stream(source, columns={"both": ["a", "b"]}), set()
    for _ in range(9):
        shapes.add(tuple(stream.read().both.shape))
        stream.commit()
    assert (0, 3) in shapes
    assert all(shape[1] == 3 for shape in shapes)


def test_a_model_trains_with_it():
    model = Model()
    model.net = nn.Linear(2, 1)
    model.input_fn(lambda model, mode: Sample(PoissonSource({"x": torch.randn(64, 2)}, 16, num_epochs=2)))
    model.loss_fn(lambda model, sample: model.net(sample.x).square().mean())
    model.optimizer_fn(optimizer_fn.optimizer_setter(lambda variables: torch.optim.SGD(variables, lr=0.1)))
    model.compile().fit(procedure_fn.train(max_step=8))
    assert model.net.weight.isfinite().all()


@pytest.mark.parametrize(
    ("call", "error", "what"),
    [
        (lambda: numbers(10, 11), ConfigError, "batch_size=11 of 10 rows"),
        (lambda: numbers(10, 0), ConfigError, "batch_size is 0"),
        (lambda: numbers(10, 2, steps_per_epoch=0), ConfigError, "steps_per_epoch is 0"),
        (lambda: numbers(10, 2, num_epochs=0), ConfigError, "num_epochs is 0"),
        (lambda: PoissonSource({}, 2), DataError, "no tensors were given"),
        (lambda: numbers(2, 1).divided(0, 3), DataError, "2 rows cannot be divided among 3 workers"),
    ],
)
def test_mistakes(call, error, what):
    with pytest.raises(error, match=what):
        call()
