from __future__ import annotations

import logging
import types

from plait.demo import agreed


def test_both_parties_made_the_same_steps_and_evaluations(trained):
    for model in (trained.leader, trained.follower):
        assert int(model.global_step) == 3 * 45
        assert [entry["global_step"] for entry in model.history] == [45, 90, 135]


def test_what_has_travelled_is_said_in_the_words_that_the_view_looks_for(caplog):
    channel = types.SimpleNamespace(sent_bytes=1_250_000, received_bytes=40_000)
    hook = agreed.Travelled(types.SimpleNamespace(communicator=types.SimpleNamespace(channel=channel), global_step=45))
    with caplog.at_level(logging.INFO, "plait"):
        hook.after_run(None, None)
    assert caplog.messages == ["global step 45; on the wire: 1.2 MB sent, 0.0 MB received"]


def test_little_more_than_the_tensors_travels(trained):
    """64 numbers an image each way in training, one way in evaluation; and words, which cost less than a tenth."""
    tensors = 3 * 4 * 64 * 1437
    sent, received = trained.leader.communicator.channel.sent_bytes, trained.leader.communicator.channel.received_bytes
    assert tensors < sent < 1.1 * tensors
    assert tensors < received - 3 * 4 * 64 * 360 < 1.1 * tensors
