"""Logits that TF-Slim's layers gave in TensorFlow 2.21, for networks that the package tf_slim does not bring along."""

import numpy as np
import pytest
import torch

from plait import nets

LOGITS = [
    ("lenet", 28, 28, [[0.409029, 0.703792, -0.229203, -0.823657], [-0.111757, 0.761765, 0.469337, -0.428658]]),
    ("lenet", 31, 22, [[-0.398337, 0.238033, 0.370291, -0.074533], [-0.02209, 0.283708, -0.172251, -0.320137]]),
    ("cifarnet", 32, 32, [[0.05802, -0.000851, 0.089683, -0.051363], [-0.044887, -0.016432, 0.197972, -0.011155]]),
    (
        "mobilenet_v1_025",
        65,
        96,
        [[-0.360984, -1.581983, 0.704816, 0.022568], [-0.13732, -1.134548, 0.243273, 0.252675]],
    ),
    (
        "mobilenet_v1_050",
        64,
        33,
        [[0.210237, 0.076999, 0.019743, -0.106456], [-0.028181, -0.008099, 0.10691, -0.236716]],
    ),
    ("mobilenet_v2_035", 65, 96, [[0.148288, 0.07713, 0.064957, -0.326646], [0.148054, 0.077016, 0.065214, -0.326405]]),
    ("mobilenet_v2", 64, 33, [[0.097938, 0.075892, -0.005966, -0.090917], [0.090493, 0.067521, -0.004986, -0.091972]]),
]
"""Network, height, width, and the first four logits of two pictures."""
# how a tensor's dimensions lie in TensorFlow, seen from torch, and back
THERE = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}
BACK = {1: (0,), 2: (1, 0), 4: (3, 2, 0, 1)}


def numbers(shape, seed):
    """Between -1 and 1, the same in every library."""
    return ((np.arange(np.prod(shape)) * 7919 + seed) % 10007 / 5003 - 1).reshape(shape)


def value_for(name, shape):
    """What TensorFlow's variable `name` was filled with, as a tensor of torch."""
    leaf = name.rpartition("/")[2]
    depthwise = leaf == "depthwise_weights"
    there = (2, 3, 0, 1) if depthwise else THERE[len(shape)]
    drawn = numbers([shape[axis] for axis in there], sum(map(ord, name)))
    if leaf.endswith("weights"):
        drawn = drawn * np.sqrt(6 / np.prod(shape[1:]))
    elif leaf in ("gamma", "moving_variance"):
        drawn = 1 + 0.4 * drawn
    else:
        drawn = 0.1 * drawn
    return torch.from_numpy(drawn.transpose((2, 3, 0, 1) if depthwise else BACK[len(shape)]).astype(np.float32))


@pytest.mark.parametrize(("name", "height", "width", "logits"), LOGITS)
def test_logits_are_tensorflow_s(name, height, width, logits):
    net = nets.build(name, height=height, width=width).eval()
    state = net.state_dict()
    filled = {key: value_for(f"{net.scope}/{key.replace('.', '/')}", value.shape) for key, value in state.items()}
    net.load_state_dict(filled)
    pictures = numbers((2, height, width, nets.info(name).channels), 1).transpose(0, 3, 1, 2).astype(np.float32)
    with torch.no_grad():
        found = net(torch.from_numpy(pictures))[0]
    torch.testing.assert_close(found[:, :4], torch.tensor(logits), rtol=1e-4, atol=1e-5)
