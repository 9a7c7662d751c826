"""Unigram samplers: counts that are given, and counts that are learnt and kept."""

from __future__ import annotations

import pytest
import torch

import plait
from plait import efl
from plait.errors import ConfigError, VariableError
from plait.nn import LearnedUnigram, fixed_unigram_candidate_sampler, learned_unigram_candidate_sampler

CLASSES = torch.arange(5).unsqueeze(1)
COUNTS = (4.0, 9.0, 1.0, 0.0, 25.0)
DRAWS = 1_000_000


def fixed(num_sampled=10, unique=False, range_max=5, classes=CLASSES, **options):
    options = options or {"unigrams": COUNTS}
    return fixed_unigram_candidate_sampler(classes, 1, num_sampled, unique, range_max, **options)


def within_three_sigma(drawn, chance):
    sigma = (len(drawn) * chance * (1 - chance)).sqrt()
    return ((drawn.bincount(minlength=len(chance)) - len(drawn) * chance).abs() <= 3 * sigma).all()


@pytest.mark.parametrize("distortion", [1.0, 0.75, 0.0])
def test_fixed_frequencies_are_within_three_sigma(distortion):
    torch.manual_seed(3)
    counts = (4.0, 9.0, 1.0, 2.0, 25.0)
    weights = torch.tensor(counts, dtype=torch.float64) ** distortion
    found = fixed(DRAWS, unigrams=counts, distortion=distortion)
    assert within_three_sigma(found.sampled_candidates, weights / weights.sum())
    torch.testing.assert_close(found.true_expected_count.flatten(), (DRAWS * weights / weights.sum()).float())


def test_a_class_without_a_count_is_never_drawn():
    found = fixed(100_000)
    assert 3 not in found.sampled_candidates
    assert found.true_expected_count[3] == 0


def test_a_file_is_read_with_reserved_ids_and_shards(tmp_path):
    file = tmp_path / "vocabulary.csv"
    file.write_text("the,10\ncat, 4\n\nsat,6\n", encoding="utf-8")
    whole = fixed(1, classes=torch.arange(4).unsqueeze(1), range_max=4, vocab_file=file, num_reserved_ids=1)
    torch.testing.assert_close(whole.true_expected_count.flatten(), torch.tensor([0, 0.5, 0.2, 0.3]))
    halves = [
        fixed(1, classes=torch.arange(n).unsqueeze(1), range_max=n, vocab_file=file, num_shards=2, shard=2 - n)
        for n in (2, 1)
    ]
    torch.testing.assert_close(halves[0].true_expected_count.flatten(), torch.tensor([10 / 16, 6 / 16]))
    assert halves[1].sampled_candidates.tolist() == [0]
    file.write_text("a,1\nb,1\n", encoding="utf-8")
    assert fixed(1, classes=CLASSES[:2], range_max=2, vocab_file=file).true_expected_count.flatten().tolist() == [
        0.5,
        0.5,
    ]


def test_learned_counts_are_those_of_the_true_classes():
    torch.manual_seed(4)
    sampler = LearnedUnigram(5)
    first = sampler(CLASSES, 1, 4, False)
    assert first.true_expected_count.flatten().tolist() == pytest.approx([0.8] * 5)
    sampler(torch.tensor([[0, 0], [4, 0]]), 2, 4, False)
    assert sampler.counts.tolist() == [5, 2, 2, 2, 3]
    found = sampler(CLASSES, 1, DRAWS, False)
    chance = torch.tensor([5, 2, 2, 2, 3], dtype=torch.float64) / 14
    torch.testing.assert_close(found.true_expected_count.flatten(), (DRAWS * chance).float())
    assert within_three_sigma(found.sampled_candidates, chance)


def test_an_evaluation_learns_nothing():
    sampler = LearnedUnigram(5).eval()
    sampler(CLASSES, 1, 4, False)
    assert sampler.counts.tolist() == [1] * 5


def loss_fn(model, sample):
    found = learned_unigram_candidate_sampler(sample.word.unsqueeze(1), 1, 3, True, 20, name="words")
    weights = plait.get_variable("weights", [20, 2])
    return weights[found.sampled_candidates].sum()


def trained(directory, steps, **more):
    model = efl.Model(seed=1)
    source = plait.data.TensorSource({"word": torch.arange(40) % 7}, 4, shuffle=True, num_epochs=3)
    model.input_fn(lambda model, mode: source)
    model.loss_fn(loss_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(lambda params: torch.optim.SGD(params, lr=0.1)))
    model.compile()
    model.fit(efl.procedure_fn.train(max_step=steps), checkpoint_dir=directory, **more)
    return {name: value.detach().clone() for name, value in model.variables().items()}


def test_counts_and_draws_go_on_exactly_after_a_resume(tmp_path):
    torch.manual_seed(0)
    whole = trained(tmp_path / "whole", 20)
    torch.manual_seed(0)
    trained(tmp_path / "parts", 9)
    resumed = trained(tmp_path / "parts", 20)
    assert whole["words/counts"].sum() == 20 + 20 * 4
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_outside_of_a_model_the_function_says_what_to_use():
    with pytest.raises(VariableError, match="no model is at hand"):
        learned_unigram_candidate_sampler(CLASSES, 1, 3, True, 5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"distortion": 1.0}, "either as vocab_file"),
        ({"unigrams": COUNTS[:3]}, "3 counts"),
        ({"unigrams": (0.0,) * 5}, "only 0 have"),
        ({"unigrams": COUNTS, "num_shards": 2, "shard": 2}, "shard=2"),
        ({"unigrams": (-1.0,) * 5}, "numbers from 0 on"),
        ({"vocab_file": "nowhere.csv"}, "cannot be read"),
    ],
)
def test_counts_that_cannot_work_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        fixed(3, **options)


def test_a_line_without_a_count_is_named(tmp_path):
    (tmp_path / "v.csv").write_text("a,1\nb\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        fixed(1, classes=CLASSES[:2], range_max=2, vocab_file=tmp_path / "v.csv")


def test_a_name_stands_for_one_number_of_classes():
    model = plait.Model()
    with model.scope():
        learned_unigram_candidate_sampler(CLASSES, 1, 3, True, 5)
        with plait.variable_scope("other"):
            learned_unigram_candidate_sampler(CLASSES, 1, 3, True, 6)
    with model.scope(), pytest.raises(ConfigError, match="made for 5"):
        learned_unigram_candidate_sampler(CLASSES, 1, 3, True, 7)
