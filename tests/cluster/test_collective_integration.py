"""Groups of two and three workers on this machine, in shared memory and over gloo."""

from __future__ import annotations

import pytest

from .group import run_group

CASES = [
    "parity", "uneven", "alternating", "layouts", "rows", "leaving", "bf16", "merge", "local_sgd", "local_adam",
    "local_leave", "adaptive", "trees", "broadcast", "calls", "nothing_left", "other_program", "other_model",
]  # fmt: skip

GROUPS = [
    pytest.param((2, True), id="2-shared"),
    pytest.param((2, False), id="2-gloo"),
    pytest.param((3, True), id="3-shared"),
    pytest.param((3, False), id="3-gloo", marks=pytest.mark.slow),
]


class Group:
    """What the workers of one group found, case by case."""

    def __init__(self, workers, shared):
        self.workers, self.shared = workers, shared
        self.found = run_group(CASES, workers, shared=shared)

    def each(self, name):
        return [one[name] for one in self.found]


@pytest.fixture(scope="module", params=GROUPS)
def group(request):
    return Group(*request.param)


def test_workers_train_as_one_process_would(group):
    for found in group.each("parity"):
        for name, (difference, same) in found.items():
            assert difference < (1e-10 if "float64" in name else 1e-4), name
            assert same, f"{name}: workers have different bits"


def test_a_gradient_that_only_others_have_counts_as_zeros_here(group):
    assert group.each("uneven") == [[True] * 5] * group.workers


def test_lists_of_parameters_that_take_turns(group):
    assert group.each("alternating") == [True] * group.workers


def test_any_dtype_and_layout(group):
    for channels_last, double, half, holes in group.each("layouts"):
        assert max(channels_last, holes) < 1e-6
        assert double < 1e-15
        assert half < 0.02


def test_gradients_of_rows_stay_rows(group):
    assert group.each("rows") == [True] * group.workers


def test_a_message_that_goes_along_may_be_another_tensor_on_one_worker(group):
    assert group.each("leaving") == [True] * group.workers


def test_bf16_rounds_what_travels(group):
    for worst, same, dtype in group.each("bf16"):
        assert same
        assert dtype == "torch.float64"
        assert worst == 0 if group.shared else 1e-4 < worst < 0.02  # in shared memory, nothing travels


def test_merged_gradients_are_sent_once(group):
    assert group.each("merge") == [[True, True]] * group.workers


def test_local_sgd_takes_the_mean_every_so_many_steps(group):
    moved = (1 + group.workers) / 2  # the mean of what workers move by in a step
    offset = (group.workers - 1) / 2
    for rank, found in enumerate(group.each("local_sgd")):
        seen = found["seen"]
        assert [one[0] for one in seen] == [False, False, False, True] * 2 + [False, False, True]
        assert [seen[step][1] for step in (3, 7, 10)] == [-4 * moved, -8 * moved, -10 * moved]
        assert seen[4][1] == -4 * moved - (rank + 1)
        assert [seen[step][2] for step in (3, 7, 10)] == [3 + offset, 7 + offset, 9 + offset]
        assert found["state"] == {"every": 4, "steps": 2, "start": None}
        assert found["frozen"]


def test_local_sgd_makes_the_optimizers_state_equal_too(group):
    assert all(all(one) for one in group.each("local_adam"))


def test_a_worker_that_leaves_local_sgd_takes_the_others_along(group):
    left, *others = group.each("local_leave")
    mean = (group.workers - 1) / 2
    assert left == ["went", mean, True]
    assert others == [[[3, True], mean, True]] * (group.workers - 1)


def test_adaptive_local_sgd_follows_the_mean_loss(group):
    # ceil(sqrt(2 / 8 * 4)) = 1, then ceil(sqrt(10000 / 8 * 4)) = 71, at most 16
    expected = {"means": [[3, 4], [7, 1], [8, 16]], "same": True}
    assert group.each("adaptive") == [expected] * group.workers


def test_trees_are_gathered_told_and_reduced(group):
    for found in group.each("trees"):
        assert all(all(one) if isinstance(one, list) else one for one in found.values()), found


def test_broadcast_gives_everybody_the_chiefs_values(group):
    expected = [[0.0] * 6, [0, 0], [True], [0.5] * 4, [], [0.0] * 24, [0.0, 0.0]]
    assert group.each("broadcast") == [expected] * group.workers


def test_a_reduction_is_few_calls(group):
    """Of 20 gradients. Exact for Python 3.10 and 3.11; later ones enter no function for a comprehension."""
    most = {(2, True): 20, (3, True): 25, (2, False): 48, (3, False): 49}[group.workers, group.shared]
    first, *others = group.each("calls")
    assert others == [first] * (group.workers - 1)
    assert first <= most


def test_shared_memory_is_given_back(group):
    assert group.each("nothing_left") == [[group.shared, False]] * group.workers


def test_workers_that_do_different_things_are_told(group):
    for rank, text in enumerate(group.each("other_program")):
        assert "workers do not do the same" in text or "has left" in text
        assert f"worker {rank}" in text
        assert "'gather'" in text
        assert "'end of stage'" in text


def test_workers_with_different_models_are_told(group):
    for text in group.each("other_model"):
        assert "every worker has to build the same model" in text


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "gloo"])
def test_a_killed_worker_is_noticed_at_once(shared):
    *found, killed = run_group(["killed"], 3, shared=shared, timeout=30, endings=[0, 0, -9])
    for one in found:
        assert one["killed"]["at"] - killed["at"] < 5
        assert "worker 2" in one["killed"]["error"]


def test_a_worker_that_does_not_come_to_a_step_is_named():
    first, second = run_group(["stopped"], 2, timeout=2)
    assert 2 <= first["stopped"]["seconds"] < 3
    assert "worker 0 has waited 2 s for worker 1" in first["stopped"]["error"]
    assert "worker 0 has left: " in second["stopped"]["error"] or "it has left: " in second["stopped"]["error"]
