"""The follower: it trains on the right halves, exports its part, and writes its rows where its server finds them."""

from __future__ import annotations

import common
import torch
from safetensors.torch import save_file
from torch import nn

import plait
from plait import efl
from plait.export.parts import export_part


def input_fn(model, mode):
    return common.source("right", mode)


def right_of(sample):
    return plait.layer("right", nn.Linear, 32, 64)(sample.half).relu()


def loss_fn(model, sample):
    model.send("right", right_of(sample), require_grad=True)


def predict_fn(model, sample):
    """What is sent is the output of this party's part; evaluation is the same."""
    model.send("right", right_of(sample))


def main():
    model = efl.FederalModel(sample_id="id")
    model.input_fn(input_fn).loss_fn(loss_fn).eval_fn(predict_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(common.ADAM))
    model.fit(common.PROCEDURE, project_name="serving")
    part = model.part(predict_fn, {"half": torch.zeros(2, 32)})
    export_part(part, common.EXPORTS / "follower", formats=common.FORMATS)
    half = common.halves("right")
    save_file({"id": torch.arange(len(half)), "half": half.contiguous()}, common.EXPORTS / "rows.safetensors")


if __name__ == "__main__":
    main()
