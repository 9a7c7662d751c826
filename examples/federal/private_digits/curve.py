"""Accuracy against epsilon: both parties are trained with more and more noise, and the figure is drawn.

    python examples/federal/private_digits/curve.py docs/privacy.png

It needs matplotlib (`pip install 'plait[plot]'`) and takes a few minutes.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NOISES = (0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
RATES = {3.0: 0.9, 4.0: 0.6, 6.0: 0.4}
"""More noise wants smaller steps: those with less take the usual 1.2."""


def trained(noise, seed, *more):
    """Accuracy, and the leader's epsilons against outsiders and against the follower."""
    rate = RATES.get(noise, 1.2)
    command = [
        *(str(Path(sys.executable).with_name("plait")), "federate", str(HERE / "leader.py"), str(HERE / "follower.py")),
        *("--noise", str(noise), "--rate", str(rate), "--seed", str(seed), *more),
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    accuracy = float(re.findall(r"held out: (\S+)", out)[0])
    outsider, peer = re.findall(r"the leader's pictures: epsilon (\S+) against outsiders, (\S+) against", out)[0]
    return accuracy, float(outsider), float(peer)


def measured(seeds, noises, more):
    """By noise multiplier: means of accuracy and epsilons, and the accuracies' spread."""
    found = {}
    for noise in noises:
        runs = [trained(noise, seed, *more) for seed in range(seeds)]
        accuracies, outsiders, peers = zip(*runs, strict=True)
        found[noise] = (
            *(statistics.mean(one) for one in (accuracies, outsiders, peers)),
            statistics.pstdev(accuracies),
        )
        print("noise {}: accuracy {:.4f}, epsilon {:.2f} and {:.2f}".format(noise, *found[noise]), flush=True)
    return found


def draw(noised, bare, without, path):
    import matplotlib as mpl  # noqa: PLC0415 - an extra

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - same

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=120, layout="constrained")
    for found, place, label, style in (
        (bare, 1, "against outsiders; gradients go back bare", "C0s:"),
        (noised, 1, "against outsiders; gradients go back noised", "C0o-"),
        (noised, 2, "against the follower; gradients go back noised", "C1o-"),
    ):
        points = sorted((one[place], one[0], one[3]) for one in found.values())
        epsilons, accuracies, spreads = zip(*points, strict=True)
        axes.errorbar(epsilons, accuracies, yerr=spreads, fmt=style, capsize=3, label=label)
    axes.axhline(without, color="0.5", linestyle="--", label="without privacy")
    axes.set_xscale("log")
    axes.set(xlabel="epsilon of the leader's pictures, delta 1e-5", ylabel="accuracy on 1,000 pictures held out")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", help="where to draw")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--noises", type=float, nargs="+", default=NOISES)
    parser.add_argument("--epochs", default="15")
    parser.add_argument("--data", default="~/.cache/plait/digits")
    args = parser.parse_args()
    more = ["--epochs", args.epochs, "--data", args.data]
    print("gradients go back noised:")
    noised = measured(args.seeds, args.noises, more)
    print("gradients go back as they are:")
    bare = measured(args.seeds, args.noises, [*more, "--unnoise"])
    print("without privacy:")
    without = measured(1, [0.0], [*more, "--clip", "1000"])[0.0][0]
    draw(noised, bare, without, args.path)


if __name__ == "__main__":
    main()
