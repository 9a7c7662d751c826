"""The demo's two parties in one process, trained once for all tests that look at what came of it."""

from __future__ import annotations

import threading
import types

import pytest
import torch

from plait import efl
from plait.demo import agreed, centralised, follower, leader

PASSES = 3
SECONDS = 60.0


@pytest.fixture(scope="package")
def trained():
    """Both parties after three passes, and the centralised model that began with the same weights."""
    begin = {name: value.detach().clone() for name, value in centralised.train_centralised(0).variables().items()}
    joined = efl.Communicator.pair(timeout=20.0)
    found = {}

    def train(build, communicator):
        try:
            model = build(efl.FederalModel(communicator=communicator, sample_id="id"))
            with torch.no_grad():  # threads share torch's random state; processes have one each
                for name, value in model.variables().items():
                    value.copy_(begin[name])
            agreed.fit(model, PASSES)
            found[communicator.role] = model
        finally:
            communicator.close()

    parties = zip((leader.build, follower.build), joined, strict=True)
    threads = [threading.Thread(target=train, args=party, daemon=True) for party in parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert sorted(found) == ["follower", "leader"]
    return types.SimpleNamespace(**found, whole=centralised.train_centralised(PASSES))
