"""Rows that are elsewhere: the same numbers and gradients as torch's own embeddings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.cluster.embedding import Gradients, SparseEmbedding
from plait.cluster.ps.lookup import AheadSource, described, replace_embeddings, sparse_embeddings
from plait.cluster.ps.spec import TableSpec
from plait.data import Sample, TensorSource
from plait.data.sources import IterableSource, SequenceSource
from plait.data.stream import Stream
from plait.errors import ConfigError, OutOfRangeError

ROWS, DIM = 8, 3


class Held:
    """Tables in this process, from the start values of a model's embeddings."""

    def __init__(self, *weights):
        self.gradients = Gradients()
        self.tables = [weight.detach().clone() for weight in weights]
        self.asked = []

    def ask(self, table, ids, *, create):
        self.asked.append(("ahead", table, ids.tolist(), create))

    def pull(self, table, ids, *, create):
        self.asked.append((table, ids.tolist(), create))
        return self.tables[table][ids]

    def dense(self, table=0, scale=1.0):
        """The gradients as torch would have them."""
        found = torch.zeros_like(self.tables[table])
        ids, rows = self.gradients.take(scale)[table]
        return found.index_add_(0, ids, rows)


def both(module):
    """A module with its rows elsewhere, what holds them, and torch's own."""
    plain = type(module)(ROWS, DIM, sparse=True, padding_idx=module.padding_idx)
    plain.load_state_dict(module.state_dict())
    held = Held(module.weight)
    with torch.no_grad():
        replace_embeddings(nn.ModuleDict({"table": module}), held)
        module.weight.fill_(float("nan"))  # its own rows are not looked at
    return module, held, plain


IDS = torch.tensor([[1, 5, 1], [0, 7, 5]])


def weigh(rows):
    """A loss whose gradient is another in every place."""
    return (rows * torch.arange(1.0, 1 + rows.numel()).view(rows.shape)).sum() + rows.square().sum()


def test_rows_are_asked_for_ahead_as_they_will_be_looked_up():
    module, held, _ = both(nn.Embedding(ROWS, DIM, sparse=True))
    for trains in (True, False):
        held.asked.clear()
        with torch.set_grad_enabled(trains):
            module.forward.ask(IDS)
            module(IDS)
        assert held.asked == [("ahead", 0, IDS.flatten().tolist(), trains), (0, IDS.flatten().tolist(), trains)]


def test_ids_that_have_to_be_copied_are_copied_once(monkeypatch):
    module, held, _ = both(nn.Embedding(ROWS, DIM, sparse=True))
    places = []
    monkeypatch.setattr(held, "ask", lambda table, ids, *, create: places.append(ids.data_ptr()))
    pull = held.pull
    monkeypatch.setattr(
        held, "pull", lambda table, ids, *, create: (places.append(ids.data_ptr()), pull(table, ids, create=create))[1]
    )
    small = IDS.int()
    module.forward.ask(small)
    module(small)
    assert places[0] == places[1]


class TestEmbedding:
    @pytest.mark.parametrize("ids", [IDS, IDS[0], torch.tensor(3), IDS[:, :0], IDS.int(), IDS[:, ::2]])
    def test_rows_and_gradients(self, ids):
        module, held, plain = both(nn.Embedding(ROWS, DIM, sparse=True))
        assert torch.equal(module(ids), plain(ids))
        weigh(module(ids)).backward()
        weigh(plain(ids)).backward()
        torch.testing.assert_close(held.dense(), plain.weight.grad.to_dense())
        assert module.weight.grad is None

    @pytest.mark.parametrize("padding_row", [0.0, 2.0])
    def test_padding_is_given_and_not_trained(self, padding_row):
        table = nn.Embedding(ROWS, DIM, sparse=True, padding_idx=5)
        with torch.no_grad():
            table.weight[5] = padding_row
        module, held, plain = both(table)
        assert torch.equal(module(IDS), plain(IDS))
        weigh(module(IDS)).backward()
        weigh(plain(IDS)).backward()
        torch.testing.assert_close(held.dense(), plain.weight.grad.to_dense())
        with torch.no_grad():
            assert torch.equal(module(IDS), plain(IDS))

    def test_several_lookups_of_a_table_in_a_step(self):
        module, held, plain = both(nn.Embedding(ROWS, DIM, sparse=True))
        for one in (module, plain):
            (weigh(one(IDS)) * weigh(one(IDS[1]))).backward()
        torch.testing.assert_close(held.dense(), plain.weight.grad.to_dense())

    def test_several_backward_passes_add_up_and_are_scaled(self):
        module, held, plain = both(nn.Embedding(ROWS, DIM, sparse=True))
        for ids in (IDS, IDS + 0):
            weigh(module(ids)).backward()
            weigh(plain(ids)).backward()
        torch.testing.assert_close(held.dense(scale=0.25), plain.weight.grad.to_dense() / 4)
        assert held.gradients.take(1.0) == {}

    def test_of_several_losses_each_gives_what_moves_the_table_by_it(self):
        module, held, plain = both(nn.Embedding(ROWS, DIM, sparse=True))
        other = torch.ones((), requires_grad=True)
        rows, theirs = module(IDS), plain(IDS)
        torch.autograd.grad(weigh(rows) * other, [other], retain_graph=True)
        assert held.gradients.take(1.0) == {}
        found = torch.autograd.grad(weigh(rows), [module.weight], retain_graph=True, allow_unused=True)
        assert found == (None,)
        (expected,) = torch.autograd.grad(weigh(theirs), [plain.weight])
        torch.testing.assert_close(held.dense(), expected.to_dense())

    @pytest.mark.parametrize("trains", [True, False])
    def test_rows_are_made_only_for_training(self, trains):
        module, held, _ = both(nn.Embedding(ROWS, DIM, sparse=True))
        with torch.set_grad_enabled(trains):
            assert module(IDS[0]).requires_grad is trains
        assert held.asked == [(0, [1, 5, 1], trains)]

    def test_a_frozen_table_takes_part_in_no_backward_pass(self):
        module, held, _ = both(nn.Embedding(ROWS, DIM, sparse=True).requires_grad_(False))
        assert not module(IDS).requires_grad
        assert held.asked[0][2] is False

    def test_the_rows_that_came_may_be_changed_in_place(self):
        module, held, plain = both(nn.Embedding(ROWS, DIM, sparse=True))
        for one in (module, plain):
            weigh(one(IDS).mul_(2.0)).backward()
        torch.testing.assert_close(held.dense(), plain.weight.grad.to_dense())


class TestBag:
    @pytest.mark.parametrize("mode", ["sum", "mean"])  # torch has no sparse gradients of "max"
    @pytest.mark.parametrize(
        ("ids", "offsets"), [(IDS, None), (IDS.view(-1), torch.tensor([0, 0, 4])), (IDS[0], torch.tensor([0]))]
    )
    def test_rows_and_gradients(self, mode, ids, offsets):
        module, held, plain = both(nn.EmbeddingBag(ROWS, DIM, sparse=True))
        module.mode = plain.mode = mode
        torch.testing.assert_close(module(ids, offsets), plain(ids, offsets))
        weigh(module(ids, offsets)).backward()
        weigh(plain(ids, offsets)).backward()
        torch.testing.assert_close(held.dense(), plain.weight.grad.to_dense())

    def test_weights_of_samples(self):
        module, held, plain = both(nn.EmbeddingBag(ROWS, DIM, sparse=True, mode="sum"))
        plain.mode = "sum"
        for one in (module, plain):
            weigh(one(IDS, per_sample_weights=torch.linspace(0, 1, 6).view(2, 3))).backward()
        torch.testing.assert_close(held.dense(), plain.weight.grad.to_dense())

    def test_a_last_offset_may_be_included(self):
        module, _, plain = both(nn.EmbeddingBag(ROWS, DIM, sparse=True))
        module.include_last_offset = plain.include_last_offset = True
        offsets = torch.tensor([0, 2, 6])
        torch.testing.assert_close(module(IDS.view(-1), offsets), plain(IDS.view(-1), offsets))


class TestWhich:
    def test_those_with_rows_of_gradients_by_their_paths_in_order(self):
        model = nn.ModuleDict(
            {
                "a": nn.Embedding(ROWS, DIM),
                "b": nn.Sequential(nn.Embedding(ROWS, DIM, sparse=True)),
                "c": nn.EmbeddingBag(ROWS, DIM, sparse=True),
                "d": SparseEmbedding(DIM),
            }
        )
        assert list(sparse_embeddings(model)) == ["b.0", "c", "d"]

    def test_each_has_its_own_table(self):
        model = nn.ModuleList([nn.Embedding(ROWS, DIM, sparse=True) for _ in range(2)])
        held = Held(*(one.weight for one in model))
        assert list(replace_embeddings(model, held)) == ["0", "1"]
        model[1](IDS).sum().backward()
        assert (held.asked[0][0], list(held.gradients.take(1.0))) == (1, [1])

    def test_others_of_the_class_are_left_alone(self):
        module, held, plain = both(nn.Embedding(ROWS, DIM, sparse=True))
        plain(IDS)
        assert held.asked == []

    @pytest.mark.parametrize(
        ("module", "words"),
        [
            (nn.Embedding(ROWS, DIM, sparse=True, max_norm=1.0), "embedding 'a' has max_norm or scale_grad_by_freq"),
            (
                nn.Embedding(ROWS, DIM, sparse=True, scale_grad_by_freq=True),
                "which servers do not know: leave them out",
            ),
            (nn.EmbeddingBag(ROWS, DIM, sparse=True, padding_idx=1), "EmbeddingBag 'a' has a padding_idx"),
        ],
    )
    def test_what_servers_do_not_know(self, module, words):
        with pytest.raises(ConfigError, match=words):
            replace_embeddings(nn.ModuleDict({"a": module}), Held())

    def test_tables_are_described(self):
        assert described("net.table", nn.Embedding(ROWS, DIM), 2) == TableSpec(
            name="net/table/weight", dim=DIM, dtype="float32", rows=ROWS, optimizer=2
        )
        assert described("free", SparseEmbedding(DIM, seed=3), None).rows is None


class TestAhead:
    def read(self, source, **place):
        order = []
        ahead = AheadSource(source, lambda sample: order.append(("ahead", int(sample.x))))
        for sample in ahead.batches(place.get("epoch", 0), place.get("start", 0)):
            order.append(("given", int(sample.x)))
        return order

    def batches(self, count):
        return SequenceSource([{"x": torch.tensor(i)} for i in range(count)])

    def test_the_next_batch_is_announced_before_one_is_given(self):
        assert self.read(self.batches(3)) == [("ahead", 1), ("given", 0), ("ahead", 2), ("given", 1), ("given", 2)]

    @pytest.mark.parametrize(("count", "order"), [(0, []), (1, [("given", 0)])])
    def test_there_may_be_no_next_one(self, count, order):
        assert self.read(self.batches(count)) == order

    def test_it_begins_where_it_is_asked_to(self):
        assert self.read(self.batches(4), start=2) == [("ahead", 3), ("given", 2), ("given", 3)]

    def test_what_is_announced_is_what_is_given(self):
        seen = []
        ahead = AheadSource(TensorSource({"x": torch.arange(6)}, 2), seen.append)
        given = list(ahead.batches(0, 0))
        assert [one is other for one, other in zip(seen, given[1:], strict=True)] == [True, True]
        assert all(isinstance(one, Sample) for one in given)

    def test_it_says_what_its_source_says(self):
        source = TensorSource({"x": torch.arange(6)}, 2, num_epochs=3)
        ahead = AheadSource(source, lambda sample: None)
        assert (ahead.num_epochs, ahead.batch_size, ahead.seekable) == (3, 2, True)
        assert ahead.fingerprint() == source.fingerprint()

    def test_a_stream_over_it_counts_what_was_given(self):
        stream = Stream(AheadSource(self.batches(2), lambda sample: None))
        for number in range(2):
            assert int(stream.read().x) == number
            stream.commit()
        with pytest.raises(OutOfRangeError, match="over after 2 batches"):
            stream.read()

    def test_a_pass_that_is_given_up_ends_its_readers(self):
        ended = []

        def numbers():
            try:
                yield from ({"x": torch.tensor(i)} for i in range(5))
            finally:
                ended.append(True)

        class Numbers:
            def __iter__(self):
                return numbers()

        stream = Stream(AheadSource(IterableSource(Numbers()), lambda sample: None))
        stream.read()
        stream.close()
        assert ended == [True]
