"""PNASNet-5 for ImageNet, mobile and large: one cell everywhere, with stride 2 where the map gets smaller."""

from __future__ import annotations

from plait.nets.blocks import Norm
from plait.nets.nas_cells import CellPlan, Place, Settings, creator, reduction_places

__all__ = ["create"]

CELL = CellPlan(
    steps=(
        (1, "separable_5x5", 1, "max_3x3"),
        (0, "separable_7x7", 0, "max_3x3"),
        (0, "separable_5x5", 0, "separable_3x3"),
        (4, "separable_3x3", 0, "max_3x3"),
        (1, "separable_3x3", 0, "none"),
    ),
    kept=(2, 3, 4, 5, 6),
)
VARIANTS = {
    "pnasnet_large": Settings(
        cells=12,
        filters=216,
        stem=96,
        norm=Norm(decay=0.9997, epsilon=1e-3),
        drop_path_keep_prob=0.6,
        dense_dropout_keep_prob=0.5,
        total_training_steps=250_000,
    ),
    "pnasnet_mobile": Settings(
        cells=9,
        filters=54,
        stem=32,
        norm=Norm(decay=0.9997, epsilon=1e-3),
        drop_path_keep_prob=1.0,
        dense_dropout_keep_prob=0.5,
        total_training_steps=250_000,
    ),
}


def places(settings: Settings) -> list[Place]:
    """The cells in their order: two of the stem, then the others, with twice the channels from each third part on."""
    found = [
        Place("cell_stem_0", "", CELL, 0.25, stride=2),
        Place("cell_stem_1", "Stem", CELL, 0.5, stride=2),
    ]
    scaling = 1.0
    smaller = reduction_places(settings.cells)
    for number in range(settings.cells):
        stride = 2 if number in smaller else 1
        scaling *= stride
        found.append(Place(f"cell_{number}", f"Cell_{number}", CELL, scaling, stride=stride))
    return found


create = creator(VARIANTS, places)
