"""Every recorded case: names and shapes of variables, numbers, and the records' spec are TensorFlow's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait import feature_column

from . import cases, recorded

MODULES = {"input_layer": feature_column.DenseFeatures, "linear_model": feature_column.LinearModel}


def module_of(case, folder):
    """The module of a case, its variables at the values that TensorFlow had for them."""
    module = MODULES[case["layer"]](recorded.columns_of(case, folder), **case.get("options", {}))
    with torch.no_grad():
        for name, variable in module.named_parameters():
            full = f"{case['layer']}/{name.replace('.', '/')}"
            variable.copy_(torch.from_numpy(cases.values_of(full, list(variable.shape))))
    return module


@pytest.mark.parametrize("name", cases.CASES)
def test_numbers_are_tensorflows(name, tmp_path):
    case = cases.CASES[name]
    found = module_of(case, tmp_path)(recorded.features_of(case))
    expected = np.array(recorded.RECORDED[name]["output"], np.float32)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", cases.CASES)
def test_variables_are_tensorflows(name, tmp_path):
    case = cases.CASES[name]
    named = module_of(case, tmp_path).named_parameters()
    found = {f"{case['layer']}/{path.replace('.', '/')}": list(value.shape) for path, value in named}
    assert found == recorded.RECORDED[name]["variables"]


@pytest.mark.parametrize("name", cases.CASES)
def test_records_are_asked_for_as_tensorflow_does(name, tmp_path):
    spec = feature_column.make_parse_example_spec(recorded.columns_of(cases.CASES[name], tmp_path))
    assert {key: plain(feature) for key, feature in spec.items()} == recorded.RECORDED[name]["spec"]


def plain(feature):
    dtype = str(feature.dtype).removeprefix("torch.")
    if isinstance(feature, feature_column.VarLenFeature):
        return ["variable", dtype]
    default = feature.default_value
    return ["fixed", list(feature.shape), dtype, None if default is None else list(default)]


def test_every_case_was_recorded():
    assert set(recorded.RECORDED) == set(cases.CASES)
