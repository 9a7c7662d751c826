"""NASNet-A: for CIFAR, and for ImageNet mobile and large."""

from __future__ import annotations

from plait.nets.blocks import Norm
from plait.nets.nas_cells import CellPlan, Place, Settings, creator, reduction_places

__all__ = ["create"]

NORMAL = CellPlan(
    steps=(
        (0, "separable_5x5", 1, "separable_3x3"),
        (1, "separable_5x5", 1, "separable_3x3"),
        (0, "avg_3x3", 1, "none"),
        (1, "avg_3x3", 1, "avg_3x3"),
        (0, "separable_3x3", 0, "none"),
    ),
    kept=(1, 2, 3, 4, 5, 6),
)
REDUCTION = CellPlan(
    steps=(
        (0, "separable_5x5", 1, "separable_7x7"),
        (0, "max_3x3", 1, "separable_7x7"),
        (0, "avg_3x3", 1, "separable_5x5"),
        (3, "none", 2, "avg_3x3"),
        (2, "separable_3x3", 0, "max_3x3"),
    ),
    kept=(3, 4, 5, 6),
)
VARIANTS = {
    "nasnet_cifar": Settings(
        cells=18,
        filters=32,
        stem=96,
        norm=Norm(decay=0.9, epsilon=1e-5),
        drop_path_keep_prob=0.6,
        dense_dropout_keep_prob=1.0,
        total_training_steps=937_500,
        for_cifar=True,
        skip_reduction=False,
    ),
    "nasnet_mobile": Settings(
        cells=12,
        filters=44,
        stem=32,
        norm=Norm(decay=0.9997, epsilon=1e-3),
        drop_path_keep_prob=1.0,
        dense_dropout_keep_prob=0.5,
        total_training_steps=250_000,
        skip_reduction=False,
    ),
    "nasnet_large": Settings(
        cells=18,
        filters=168,
        stem=96,
        norm=Norm(decay=0.9997, epsilon=1e-3),
        drop_path_keep_prob=0.7,
        dense_dropout_keep_prob=0.5,
        total_training_steps=250_000,
    ),
}


def places(settings: Settings) -> list[Place]:
    """The cells in their order: those of the stem, then normal ones, a reduction before every third part."""
    found: list[Place] = []
    if not settings.for_cifar:
        found += [
            Place("cell_stem_0", "", REDUCTION, 0.25, stride=2),
            Place("cell_stem_1", "Stem", REDUCTION, 0.5, stride=2),
        ]
    scaling = 1.0
    smaller = reduction_places(settings.cells)
    for number in range(settings.cells):
        back = 2
        if number in smaller:
            scaling *= 2
            which = smaller.index(number)
            found.append(Place(f"reduction_cell_{which}", f"Reduction_Cell_{which}", REDUCTION, scaling, stride=2))
            back = 3 if settings.skip_reduction else 2
        found.append(Place(f"cell_{number}", f"Cell_{number}", NORMAL, scaling, back=back))
    return found


create = creator(VARIANTS, places)
