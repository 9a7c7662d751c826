"""Forks runs that train and export, each killed in its export and then started again: DIRECTORY MOMENT..."""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import plait
from plait import mox
from plait.export import load, publish, versions
from plait.export.formats import FORMATS, Format

X = torch.linspace(-1, 1, 40).reshape(20, 2)


def input_fn(mode):
    return torch.utils.data.TensorDataset(X)


def model_fn(inputs, mode):
    out = plait.layer("fc", nn.Linear, 2, 1)(inputs[0])
    spec = mox.ExportSpec({"x": inputs[0]}, {"out": out})
    return mox.ModelSpec(loss=out.square().mean(), export_spec=spec)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(Format):
    moment = "never"

    def write(self, program, folder):
        if self.moment == "before a file":
            die()
        super().write(program, folder)
        if self.moment == "after a file":
            (folder / "model.pt2").write_bytes((folder / "model.pt2").read_bytes()[:100])
            die()

    def open_run(self, folder, about, threads):
        if self.moment == "while it is compared":
            die()
        return super().open_run(folder, about, threads)


def named(moment, rename, *given):
    if moment == "before it has its name":
        die()
    found = rename(*given)
    if moment == "after it has its name":
        die()
    return found


def one_run(directory):
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        optimizer_fn=mox.get_optimizer_fn("sgd", learning_rate=0.1),
        run_mode=mox.ModeKeys.TRAIN,
        batch_size=4,
        max_number_of_steps=5,
        log_dir=str(directory),
        export_model=mox.ExportKeys.TORCH,
    )


def in_a_child(directory, moment):
    """The signal that ended a run which dies at `moment`; 0 if it ended well."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        Deadly.moment = moment
        publish._named = functools.partial(named, moment, publish._named)
        one_run(directory)
        os._exit(0)
    finally:
        os._exit(1)


def main():
    torch.set_num_threads(1)
    FORMATS["torch"] = Deadly(module="plait.export.program")
    one_run(Path(sys.argv[1], "whole"))  # the first one imports much
    for moment in sys.argv[2:]:
        directory = Path(sys.argv[1], moment.replace(" ", "-"))
        assert in_a_child(directory, moment) == signal.SIGKILL, moment
        there = ["1"] if moment == "after it has its name" else []
        assert [path.name for path in (directory / "export").iterdir() if not path.name.startswith(".")] == there
        assert in_a_child(directory, "never") == 0, moment
        assert versions(directory / "export") == [*there, str(len(there) + 1)]
        for version in versions(directory / "export"):
            found = load(directory / "export" / version)
            assert found.about["step"] == 5
            assert found.run({"x": np.ones((3, 2), np.float32)})["out"].shape == (3, 1)
        print(moment)


if __name__ == "__main__":
    main()
