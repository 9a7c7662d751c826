"""Door `plait.openks`: the few-shot classes of OpenKS's document."""

from __future__ import annotations

from plait.data import fewshot
from plait.data.fewshot import CharacterClass as Open_KS_Character
from plait.data.fewshot import ImageClass as Open_KS_ImageNet

__all__ = ["Open_KS_Character", "Open_KS_ImageNet", "Open_KS_read"]


class Open_KS_read:  # noqa: N801 - the document's name
    """Reads a data set of folders; called on the class or on an object of it."""

    read_dataset = staticmethod(fewshot.read_dataset)
    _read_classes = staticmethod(fewshot.read_classes)
