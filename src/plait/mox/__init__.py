"""Door `plait.mox`: MoXing's `run` and what goes with it."""

from __future__ import annotations

from plait.data.folder_sets import ImageClassificationRawDataset, MultilabelClassificationRawDataset
from plait.data.folders import (
    ImageClassificationRawMetadata,
    ImageClassificationTFRecordMetadata,
    MultilabelClassificationRawMetadata,
    split_image_classification_dataset,
)
from plait.data.layouts import get_dataset_meta
from plait.data.raw import AsyncRawGenerator, ForkedReader, ParallelReader
from plait.data.record_sets import ImageClassificationTFRecordDataset, get_dataset
from plait.engine.evaluation_hooks import (
    AggregativeSessionRunHook,
    EarlyStoppingHook,
    FeedSessionRunHook,
    LogEvaluationMetricHook,
    PlateauLREarlyStoppingHook,
)
from plait.engine.op import placeholder
from plait.mox import file
from plait.mox.flags import get_flag, get_help, set_flag
from plait.mox.nets import NetworkKeys, get_model_fn, get_model_meta
from plait.mox.pictures import PreprocessingKeys, get_data_augmentation_fn
from plait.mox.run import run
from plait.mox.spec import ExportKeys, ExportSpec, ModeKeys, ModelSpec
from plait.optim import schedules as learning_rate_scheduler
from plait.optim.factories import get_optimizer_fn
from plait.optim.wrappers import get_optimizer_wrapper_fn
from plait.variables.scope import GraphKeys, get_collection, var_scope

__all__ = [
    "AggregativeSessionRunHook",
    "AsyncRawGenerator",
    "EarlyStoppingHook",
    "ExportKeys",
    "ExportSpec",
    "FeedSessionRunHook",
    "ForkedReader",
    "GraphKeys",
    "ImageClassificationRawDataset",
    "ImageClassificationRawMetadata",
    "ImageClassificationTFRecordDataset",
    "ImageClassificationTFRecordMetadata",
    "LogEvaluationMetricHook",
    "ModeKeys",
    "ModelSpec",
    "MultilabelClassificationRawDataset",
    "MultilabelClassificationRawMetadata",
    "NetworkKeys",
    "ParallelReader",
    "PlateauLREarlyStoppingHook",
    "PreprocessingKeys",
    "file",
    "get_collection",
    "get_data_augmentation_fn",
    "get_dataset",
    "get_dataset_meta",
    "get_flag",
    "get_help",
    "get_model_fn",
    "get_model_meta",
    "get_optimizer_fn",
    "get_optimizer_wrapper_fn",
    "learning_rate_scheduler",
    "placeholder",
    "run",
    "set_flag",
    "split_image_classification_dataset",
    "var_scope",
]
