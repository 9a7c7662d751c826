"""Learn to learn new characters from one drawing of each: Reptile on glyphs that this script draws itself.

A glyph is a few strokes; a drawing of it turns, stretches and shifts them a little. Training sees tasks of five glyphs
out of two hundred. Then come glyphs that it has never seen: from one drawing of each of five, which is which?

    python examples/openks/reptile.py
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn import functional

from plait import efl
from plait.data import EpisodeSource, tensor_classes
from plait.efl.optimizer_fn import inner_adam
from plait.efl.procedure_fn import reptile, reptile_eval

SIZE = 14
DRAWINGS = 12
TRAIN_GLYPHS, TEST_GLYPHS = 200, 40


def strokes(rng):
    """A glyph: two or three lines of a few points each, in a square from -1 to 1."""
    return [rng.uniform(-0.8, 0.8, (rng.integers(3, 5), 2)) for _ in range(rng.integers(2, 4))]


def drawing(glyph, rng):
    """The glyph as somebody would draw it: turned, stretched and shifted a little, every point a bit off."""
    angle = rng.uniform(-0.3, 0.3)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = turn * rng.uniform(0.85, 1.15, 2)
    shift = rng.uniform(-0.2, 0.2, 2)
    image = Image.new("L", (4 * SIZE, 4 * SIZE), 255)
    pen = ImageDraw.Draw(image)
    for line in glyph:
        points = ((line + rng.normal(0, 0.04, line.shape)) @ matrix + shift + 1) * 2 * SIZE
        pen.line([tuple(point) for point in points], fill=0, width=4)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BOX), dtype=np.float32) / 255


def draw_classes(count, seed):
    rng = np.random.default_rng(seed)
    glyphs = [strokes(rng) for _ in range(count)]
    images = np.stack([drawing(glyph, rng) for glyph in glyphs for _ in range(DRAWINGS)])
    return tensor_classes(images, np.repeat(np.arange(count), DRAWINGS))


def network():
    """Three convolutions with stride 2, each with batch normalisation, and a linear layer."""
    layers = []
    for channels in (1, 32, 32):
        layers += [nn.Conv2d(channels, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 2 * 2, 5))


def input_fn(model, mode):
    if mode is efl.MODE.TRAIN:
        return EpisodeSource(draw_classes(TRAIN_GLYPHS, 1), ways=5, shots=10, queries=0, tasks=5)
    return EpisodeSource(draw_classes(TEST_GLYPHS, 2), ways=5, shots=1, queries=1)


def loss_fn(model, sample):
    return functional.cross_entropy(model.net(sample.x.unsqueeze(1)), sample.y)


def eval_fn(model, sample):
    logits = model.net(sample.x.unsqueeze(1))[-len(sample.query_y) :]  # the last rows are those asked about
    model.add_metric("accuracy", efl.metrics.accuracy(sample.query_y, logits))


def procedure(model):
    ask = reptile_eval(100, inner_iters=20)
    ask(model)
    reptile(150, inner_iters=5)(model)
    ask(model)


def main():
    torch.manual_seed(0)
    model = efl.Model()
    model.net = network()
    model.input_fn(input_fn).loss_fn(loss_fn).eval_fn(eval_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(inner_adam(lr=3e-3)))
    model.fit(procedure)
    before, after = (100 * found["metrics"]["accuracy"] for found in model.history)
    print("five new glyphs, one drawing of each:")
    print(f"from scratch   {before:.1f}% right")
    print(f"after Reptile  {after:.1f}% right")


if __name__ == "__main__":
    main()
