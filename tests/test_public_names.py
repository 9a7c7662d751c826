"""Public names are a tested fact: listed, in order, there, and shown in a test or an example."""

from __future__ import annotations

import importlib
import re
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["plait", "plait.efl", "plait.feature_column", "plait.mox", "plait.nn", "plait.openks", "plait.train"]
TABLES = {"conformance.py", "test_conformance.py", "test_public_names.py"}
"""Tests that name everything and run nothing."""
FOR_ANNOTATIONS = {"Any", "TYPE_CHECKING", "annotations"}
"""What a package imports for its own signatures."""

PLAIT = [
    "AUTO_REUSE", "GraphKeys", "Model", "Op", "Session", "SessionConfig", "__version__", "add_to_collection", "cluster",
    "data", "efl", "errors", "feature_column", "get_collection", "get_variable", "layer", "metrics", "mox", "nets",
    "nn", "op", "openks", "placeholder", "train", "variable_scope",
]  # fmt: skip
EFL = [
    "MODE", "Communicator", "FederalModel", "Model", "Party", "Sample", "Stage", "TaskScope", "current_task_scope",
    "export", "framework", "metrics", "optimizer_fn", "privacy", "procedure_fn", "stage", "task_scope",
]  # fmt: skip

MOX = [
    "AggregativeSessionRunHook", "AsyncRawGenerator", "EarlyStoppingHook", "ExportKeys", "ExportSpec",
    "FeedSessionRunHook", "ForkedReader", "GraphKeys", "ImageClassificationRawDataset",
    "ImageClassificationRawMetadata",
    "ImageClassificationTFRecordDataset", "ImageClassificationTFRecordMetadata", "LogEvaluationMetricHook",
    "ModeKeys", "ModelSpec", "MultilabelClassificationRawDataset", "MultilabelClassificationRawMetadata",
    "NetworkKeys", "ParallelReader", "PlateauLREarlyStoppingHook", "PreprocessingKeys", "file", "get_collection",
    "get_data_augmentation_fn", "get_dataset", "get_dataset_meta", "get_flag", "get_help", "get_model_fn",
    "get_model_meta", "get_optimizer_fn", "get_optimizer_wrapper_fn", "learning_rate_scheduler", "placeholder",
    "run", "set_flag", "split_image_classification_dataset", "var_scope",
]  # fmt: skip


OPENKS = [
    "ASyncModelConfig", "AutoRoleMaker", "BaseDistributedAlgorithm", "BaseDistributedOptimizer",
    "CPUDistributedAlgorithm", "GPUDistributedAlgorithm", "GeneralDistributedOptimizer", "GeoSGDModelConfig",
    "HalfSyncModelConfig", "HeterogeneousDistributedOptimizer", "KSDistributedFactory", "Mode", "Open_KS_Character",
    "Open_KS_ImageNet", "Open_KS_read", "PaddleCloudRoleMaker", "Role", "RoleMakerBase", "SyncModeConfig",
    "UserDefinedCollectiveRoleMaker", "UserDefinedRoleMaker",
]  # fmt: skip


@pytest.mark.parametrize(
    ("package", "names"), [("plait", PLAIT), ("plait.efl", EFL), ("plait.mox", MOX), ("plait.openks", OPENKS)]
)
def test_the_names_are_these(package, names):
    """A name more or less is a change for users: it belongs into the change log."""
    assert importlib.import_module(package).__all__ == names


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_listed_is_there(package):
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_that_is_there_is_listed(package):
    module = importlib.import_module(package)
    there = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in FOR_ANNOTATIONS and not isinstance(value, types.ModuleType)
    }
    assert there - set(module.__all__) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_star_import_gives_what_is_listed(package):
    namespace = {}
    exec(f"from {package} import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(importlib.import_module(package).__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_is_used_in_a_test_or_an_example(package):
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files if path.name not in TABLES)
    words = set(re.findall(r"\w+", text))
    assert [name for name in importlib.import_module(package).__all__ if name not in words] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_function_and_class_says_what_it_is(package):
    module = importlib.import_module(package)
    things = {name: getattr(module, name) for name in module.__all__}
    silent = [name for name, thing in things.items() if callable(thing) and not (thing.__doc__ or "").strip()]
    assert silent == []
