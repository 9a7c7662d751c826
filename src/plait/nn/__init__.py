"""Candidate sampling: losses over many classes of which a step looks at a few, with TensorFlow's names and meaning."""

from __future__ import annotations

from plait.nn.losses import compute_accidental_hits, nce_loss, sampled_softmax_loss
from plait.nn.samplers import (
    Candidates,
    all_candidate_sampler,
    log_uniform_candidate_sampler,
    uniform_candidate_sampler,
)
from plait.nn.unigram import LearnedUnigram, fixed_unigram_candidate_sampler, learned_unigram_candidate_sampler

__all__ = [
    "Candidates",
    "LearnedUnigram",
    "all_candidate_sampler",
    "compute_accidental_hits",
    "fixed_unigram_candidate_sampler",
    "learned_unigram_candidate_sampler",
    "log_uniform_candidate_sampler",
    "nce_loss",
    "sampled_softmax_loss",
    "uniform_candidate_sampler",
]
