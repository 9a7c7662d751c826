"""Data: samples, the sources that they come from, and the streams that the engine reads."""

from __future__ import annotations

from plait.data.episodes import EpisodeSource, tensor_classes
from plait.data.parts import OwnPart
from plait.data.poisson import PoissonSource
from plait.data.sample import Sample
from plait.data.sources import (
    ConstantSource,
    IterableSource,
    LoaderSource,
    SequenceSource,
    Source,
    TensorSource,
    as_source,
)
from plait.data.stream import Stream
from plait.rng import derive_seed, isolated_rng, rng_state, set_rng_state

__all__ = [
    "ConstantSource",
    "EpisodeSource",
    "IterableSource",
    "LoaderSource",
    "OwnPart",
    "PoissonSource",
    "Sample",
    "SequenceSource",
    "Source",
    "Stream",
    "TensorSource",
    "as_source",
    "derive_seed",
    "isolated_rng",
    "rng_state",
    "set_rng_state",
    "tensor_classes",
]
