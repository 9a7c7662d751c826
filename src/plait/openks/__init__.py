"""Door `plait.openks`: roles, distributed algorithms and their optimizers, and few-shot classes, by OpenKS's names."""

from __future__ import annotations

import importlib
import typing

from plait.data import fewshot
from plait.data.fewshot import CharacterClass as Open_KS_Character
from plait.data.fewshot import ImageClass as Open_KS_ImageNet

if typing.TYPE_CHECKING:
    from plait.openks.algorithms import (
        BaseDistributedAlgorithm,
        CPUDistributedAlgorithm,
        GPUDistributedAlgorithm,
        KSDistributedFactory,
        Mode,
    )
    from plait.openks.optimizers import (
        ASyncModelConfig,
        BaseDistributedOptimizer,
        GeneralDistributedOptimizer,
        GeoSGDModelConfig,
        HalfSyncModelConfig,
        HeterogeneousDistributedOptimizer,
        SyncModeConfig,
    )
    from plait.openks.role_maker import (
        AutoRoleMaker,
        PaddleCloudRoleMaker,
        Role,
        RoleMakerBase,
        UserDefinedCollectiveRoleMaker,
        UserDefinedRoleMaker,
    )

__all__ = [
    "ASyncModelConfig",
    "AutoRoleMaker",
    "BaseDistributedAlgorithm",
    "BaseDistributedOptimizer",
    "CPUDistributedAlgorithm",
    "GPUDistributedAlgorithm",
    "GeneralDistributedOptimizer",
    "GeoSGDModelConfig",
    "HalfSyncModelConfig",
    "HeterogeneousDistributedOptimizer",
    "KSDistributedFactory",
    "Mode",
    "Open_KS_Character",
    "Open_KS_ImageNet",
    "Open_KS_read",
    "PaddleCloudRoleMaker",
    "Role",
    "RoleMakerBase",
    "SyncModeConfig",
    "UserDefinedCollectiveRoleMaker",
    "UserDefinedRoleMaker",
]


class Open_KS_read:  # noqa: N801 - the document's name
    """Reads a data set of folders; called on the class or on an object of it."""

    read_dataset = staticmethod(fewshot.read_dataset)
    _read_classes = staticmethod(fewshot.read_classes)


_PARTS = ("role_maker", "algorithms", "optimizers")
"""Modules whose names are imported when one is first used: most programs come in by other doors."""


def __getattr__(name: str) -> object:
    if name in __all__:
        for part in _PARTS:
            module = importlib.import_module(f"plait.openks.{part}")
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module 'plait.openks' has no attribute {name!r}")
