"""What both parties say alike: their half of each picture, what they draw for a batch, and how they keep it private."""

from __future__ import annotations

import argparse

import pictures
import torch

import plait
from plait import efl

BATCH = 500
"""Expected: each picture is in a batch, or not, by itself."""
WIDTH = 32
"""Numbers that the follower sends for a picture."""


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", default="~/.cache/plait/digits", help="where the downloaded pictures are kept")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--noise", type=float, default=2.0, help="noise multiplier; 0 trains without privacy")
    parser.add_argument("--clip", type=float, default=0.5, help="the most that one picture's gradient may count")
    parser.add_argument("--rate", type=float, default=1.2, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches; to publish, a secret of your own")
    parser.add_argument("--unnoise", action="store_true", help="gradients go back to the follower without noise")
    return parser.parse_args()


def source(side, args, mode):
    """One half of each picture, 28 by 14 pixels, about 0, and an id; digits with the left half. A fifth is held out."""
    training = mode is efl.MODE.TRAIN
    images, digits = pictures.load(args.data)
    cut = len(images) * 4 // 5
    rows = slice(cut) if training else slice(cut, None)
    half = images[..., :14] if side == "left" else images[..., 14:]
    tensors = {"id": torch.arange(len(images))[rows], "half": ((half - 0.13) / 0.31).flatten(1)[rows] / 5}
    if side == "left":
        tensors["digit"] = digits[rows]
    if training:
        return plait.data.PoissonSource(tensors, BATCH, seed=args.seed)
    return plait.data.TensorSource(tensors, 250)


def optimizer(args):
    private = efl.privacy.DPMomentum(args.rate, args.clip, args.noise, momentum=0.9)
    return efl.optimizer_fn.optimizer_setter(private)


def train(args, model):
    model.compile(opt_config={"REDUCE": "mean", "BACKEND_MODE": "unnoise" if args.unnoise else "noise"})
    model.fit(efl.procedure_fn.train_and_eval(max_iter=args.epochs), project_name="digits")


def say_epsilons(model, peer):
    """What its weights tell those who see them, and what the peer, who knows the batches, can learn."""
    ledger = model.privacy
    outsider, other = ledger.epsilon(exact=True), ledger.peer_epsilon()
    print(f"the {model.federal_role}'s pictures: epsilon {outsider:.2f} against outsiders, {other:.2f} against {peer}")
