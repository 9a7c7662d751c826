"""What private gradients are compared with: a plain loop over micro-batches."""

from __future__ import annotations

import torch
from torch import nn

from plait.privacy.recorder import Recorder

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
KINDS = [(dtype, count) for dtype in TOLERANCES for count in (1, 8, 16)]
"""Every dtype with every number of micro-batches of 16 rows."""


class First(nn.Module):
    """Of a tuple."""

    def forward(self, values):
        return values[0]


def squared(net, inputs):
    """One loss a row, whatever the net gives."""
    found = net(inputs)
    return found.flatten(1).square().sum(1) + found.flatten(1)[:, 0]


def loop(net, loss_of, inputs, microbatches, reduce=torch.mean):
    """For each micro-batch, the gradients of its loss with respect to every variable."""
    variables = [variable for variable in net.parameters() if variable.requires_grad]
    found = []
    for group in loss_of(net, inputs).view(microbatches, -1):
        parts = torch.autograd.grad(reduce(group), variables, retain_graph=True, allow_unused=True)
        found.append([torch.zeros_like(v) if p is None else p for v, p in zip(variables, parts, strict=True)])
    return variables, [torch.stack(parts) for parts in zip(*found, strict=True)]


def compare(net, inputs, dtype, microbatches, loss_of=squared, reduce=torch.mean):
    """Norms and weighted sums of a recorder are those of the loop; gives the path of each layer by its name."""
    net, tolerance = net.to(dtype), TOLERANCES[dtype]
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    variables, expected = loop(net, loss_of, inputs, microbatches, reduce)
    recorder = Recorder(net, [variables])
    with recorder.recording():
        losses = loss_of(net, inputs)
    recorder.check(losses, microbatches)
    total = torch.stack([reduce(group) for group in losses.view(microbatches, -1)]).sum()
    gradients = recorder.gradients(total, len(losses), microbatches)
    squares = torch.stack(list(gradients.squares[0].values())).sum(0)
    close(squares, torch.stack([part.flatten(1).square().sum(1) for part in expected]).sum(0), tolerance)
    weights = torch.rand(microbatches, generator=torch.Generator().manual_seed(9), dtype=dtype)
    for ours, part in zip(gradients.sums([weights])[0], expected, strict=True):
        theirs = torch.tensordot(weights, part, 1)
        close(torch.zeros_like(theirs) if ours is None else ours, theirs, tolerance)
    recorder.close()
    return {one.layer: one.path for one in recorder.report()}


def close(ours, theirs, tolerance):
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert float((ours - theirs).abs().max()) <= tolerance * max(float(theirs.abs().max()), 1e-30)
