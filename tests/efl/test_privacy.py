"""`efl.privacy` is the privacy room's optimizers, under the document's names."""

from __future__ import annotations

import inspect

from plait import efl
from plait.privacy import labels, optimizers


def test_the_names_are_the_rooms_own():
    for name in efl.privacy.__all__:
        room = optimizers if name in optimizers.__all__ else labels
        assert getattr(efl.privacy, name) is getattr(room, name)
    assert {"DPSGD", "DPMomentum", "DPAdam", "DPAdagrad", "DPRMSprop", "DPFtrl", "make_private"} <= set(
        efl.privacy.__all__
    )


def test_make_private_takes_what_is_written_down():
    found = [
        str(one.replace(annotation=one.empty))
        for one in inspect.signature(efl.privacy.make_private).parameters.values()
    ]
    assert found[:6] == [
        "factory", "l2_norm_clip", "noise_multiplier", "num_microbatches=None", "clipping='flat'", "secure_noise=False",
    ]  # fmt: skip
