"""What flags do to a run."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import mox
from plait.errors import MismatchError, PlaitError

SPEC = importlib.util.spec_from_file_location("mox_runs", Path(__file__).with_name("runs.py"))
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)

by_hand, fresh, lines, run, same, weights = runs.by_hand, runs.fresh, runs.lines, runs.run, runs.same, runs.weights


class TestFlags:
    @pytest.mark.parametrize("scale", [2.0, 1024.0])
    def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(self, scale):
        mox.set_flag("loss_scale", scale)
        model = run(max_number_of_steps=13)
        assert model.gradient.loss_scale == scale
        assert same(weights(model), by_hand(13, scale=scale))
        assert same(weights(model), by_hand(13))

    def test_the_logged_loss_is_not_scaled(self, caplog):
        run(max_number_of_steps=1)
        mox.set_flag("loss_scale", 64.0)
        run(max_number_of_steps=1)
        one, other = lines(caplog)
        assert one.split("\t")[2:] == other.split("\t")[2:]

    def test_gradients_are_clipped_by_their_norm(self):
        mox.set_flag("gradient_clip", 0.01)
        clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.01)
        found = weights(run(max_number_of_steps=13))
        assert same(found, by_hand(13, change=clip))
        assert not same(found, by_hand(13))

    def test_gradients_are_clipped_by_value(self):
        mox.set_flag("gradient_clip", 0.01)
        mox.set_flag("gradient_clip_type", "value")
        clip = functools.partial(nn.utils.clip_grad_value_, clip_value=0.01)
        assert same(weights(run(max_number_of_steps=13)), by_hand(13, change=clip))

    def test_gradients_are_clipped_after_the_scale_is_taken_out(self):
        mox.set_flag("gradient_clip", 0.01)
        mox.set_flag("loss_scale", 256.0)
        clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.01)
        assert same(weights(run(max_number_of_steps=13)), by_hand(13, change=clip, scale=256.0))

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("loss_scale", 0.0, "loss_scale=0.0, clip=None: write numbers above 0"),
            ("gradient_clip", -1.0, "clip=-1.0: write numbers above 0"),
            ("gradient_clip_type", "size", "clip_type='size': write 'norm' or 'value'"),
            ("num_gpus", 0, "num_gpus=0: write a whole number"),
            ("worker_hosts", "a,b", "'a' is no endpoint: write host:port"),
            ("ps_hosts", "a:1", "ps_hosts without worker_hosts: name the workers, too"),
            ("trainable_include_patterns", "(", r"patterns '\(': .*; write regular expressions, separated by commas"),
            ("trainable_exclude_patterns", "fc", "no variable to train"),
        ],
    )
    def test_values_that_cannot_work(self, name, value, words):
        mox.set_flag(name, value)
        with pytest.raises(PlaitError, match=words):
            run()

    @pytest.mark.parametrize(
        ("flag", "patterns", "moved"),
        [
            ("trainable_include_patterns", "fc/weight", {"fc/weight"}),
            ("trainable_include_patterns", "weight, none", {"fc/weight"}),
            ("trainable_exclude_patterns", "bias", {"fc/weight"}),
            ("trainable_exclude_patterns", "^fc/w.*t$", {"fc/bias"}),
            ("trainable_exclude_patterns", "", {"fc/weight", "fc/bias"}),
        ],
    )
    def test_trainable_patterns(self, flag, patterns, moved):
        mox.set_flag(flag, patterns)
        found = weights(run(max_number_of_steps=3))
        assert {name for name, value in fresh().items() if not torch.equal(found[name], value)} == moved

    @pytest.mark.parametrize(
        ("flag", "patterns", "loaded"),
        [
            ("checkpoint_include_patterns", "weight", {"fc/weight"}),
            ("checkpoint_exclude_patterns", "global_step,fc/weight", {"fc/bias"}),
            ("checkpoint_exclude_patterns", "logits", {"fc/weight", "fc/bias"}),
        ],
    )
    def test_checkpoint_patterns(self, trained, flag, patterns, loaded):
        mox.set_flag(flag, patterns)
        still = mox.get_optimizer_fn("sgd", learning_rate=0.0)
        found = weights(run(checkpoint_path=trained[0], optimizer_fn=still, max_number_of_steps=1))
        first = fresh()
        assert {name for name in first if torch.equal(found[name], trained[1][name])} == loaded
        assert all(torch.equal(found[name], first[name]) for name in first if name not in loaded)

    def test_patterns_that_leave_nothing_to_load(self, trained):
        mox.set_flag("checkpoint_exclude_patterns", "fc")
        with pytest.raises(MismatchError, match="nothing in .* is wanted"):
            run(checkpoint_path=trained[0])

    def test_use_fp16_computes_in_half_precision(self):
        kinds = []

        def half(inputs, mode):
            out = plait.layer("fc", nn.Linear, 2, 1)(inputs[0]).squeeze(1)
            kinds.append(out.dtype)
            return mox.ModelSpec(loss=F.mse_loss(out, inputs[1]))

        mox.set_flag("use_fp16", True)
        mox.set_flag("loss_scale", 128.0)
        found = weights(run(model_fn=half, max_number_of_steps=5))
        assert set(kinds) == {torch.float16}
        assert all(value.dtype == torch.float32 for value in found.values())
        for name, value in by_hand(5).items():
            torch.testing.assert_close(found[name], value, rtol=0.01, atol=0.01)

    def test_flags_on_the_command_line(self, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["script.py", "--own", "1", "--loss_scale", "2", "--gradient_clip=0.5"])
        gradient = run(max_number_of_steps=1).gradient
        assert (gradient.loss_scale, gradient.clip, gradient.clip_type) == (2.0, 0.5, "norm")
