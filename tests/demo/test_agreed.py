from __future__ import annotations


def test_both_parties_made_the_same_steps_and_evaluations(trained):
    for model in (trained.leader, trained.follower):
        assert int(model.global_step) == 3 * 45
        assert [entry["global_step"] for entry in model.history] == [45, 90, 135]


def test_little_more_than_the_tensors_travels(trained):
    """64 numbers an image each way in training, one way in evaluation; and words, which cost less than a tenth."""
    tensors = 3 * 4 * 64 * 1437
    sent, received = trained.leader.communicator.channel.sent_bytes, trained.leader.communicator.channel.received_bytes
    assert tensors < sent < 1.1 * tensors
    assert tensors < received - 3 * 4 * 64 * 360 < 1.1 * tensors
