from __future__ import annotations

import torch

from .in_process import make_model, servers, worker


def test_variables_and_tables_are_described_by_their_names():
    with servers(2) as role, worker(role) as strategy:
        make_model(strategy)
        spec = strategy.held.spec
    assert [variable.name for variable in spec.variables] == ["out/weight", "out/bias"]
    (table,) = spec.tables
    assert (table.name, table.rows, table.dim, table.optimizer) == ("words/weight", 12, 3, 0)


def test_the_servers_begin_with_the_workers_values():
    with servers(2) as role, worker(role) as strategy:
        model = make_model(strategy)
        before = {name: value.detach().clone() for name, value in model.variables().items()}
        with torch.no_grad():
            for value in model.variables().values():
                value.zero_()
        strategy.held.pull_variables()
        strategy.held.pull_tables()
        assert all(torch.equal(value, before[name]) for name, value in model.variables().items())


def test_rows_come_in_the_order_of_their_ids():
    ids = torch.tensor([7, 0, 7, 11, 2])
    with servers(2) as role, worker(role) as strategy:
        model = make_model(strategy)
        rows = strategy.held.rows(strategy.held.ask_rows(0, ids, 0))
        assert torch.equal(rows, model.words.weight.detach()[ids])


def test_a_server_that_is_ready_is_not_filled_again():
    with servers() as role, worker(role) as strategy:
        model = make_model(strategy)
        with torch.no_grad():
            model.out.bias.fill_(5.0)
        strategy.held.fill(0, replicas=1, version=0)
        strategy.held.pull_variables()
        assert float(model.out.bias.detach()) != 5.0
