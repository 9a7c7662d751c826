from __future__ import annotations

import pytest
import torch

from plait import mox
from plait.errors import FunctionError

ONE = torch.tensor(1.0)
VECTOR = torch.zeros(3)


def test_modes_are_their_own_names():
    keys = mox.ModeKeys
    assert [keys.TRAIN, keys.EVAL, keys.PREDICT, keys.EXPORT] == ["TRAIN", "EVAL", "PREDICT", "EXPORT"]


def test_export_keys_are_their_own_names():
    assert mox.ExportKeys.TF_SERVING == "TF_SERVING"
    assert {mox.ExportKeys.ONNX, mox.ExportKeys.TORCH} == {"ONNX", "TORCH"}


class TestModelSpec:
    def test_says_nothing_by_default(self):
        spec = mox.ModelSpec()
        assert (spec.loss, spec.var_scopes, spec.export_spec) == (None, None, None)
        assert (spec.log_info, spec.output_info, list(spec.hooks)) == ({}, {}, [])

    def test_parts_may_be_given_by_position(self):
        export = mox.ExportSpec({"x": ONE}, {"y": ONE})
        hook = mox.FeedSessionRunHook({})
        spec = mox.ModelSpec(ONE, ["a"], {"loss": ONE}, {"p": VECTOR}, export, [hook])
        assert (spec.loss, spec.var_scopes, spec.log_info) == (ONE, ["a"], {"loss": ONE})
        assert (spec.output_info, spec.export_spec, list(spec.hooks)) == ({"p": VECTOR}, export, [hook])

    @pytest.mark.parametrize(("alias", "name"), [("var_scope", "var_scopes"), ("output_dict", "output_info")])
    def test_the_documents_other_spellings_are_taken(self, alias, name):
        value = ["a"] if name == "var_scopes" else {"p": VECTOR}
        assert getattr(mox.ModelSpec(**{alias: value}), name) == value
        with pytest.raises(FunctionError, match=f"{name} and {alias}, two spellings of one thing: give one"):
            mox.ModelSpec(**{alias: value, name: value})

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"log_info": [ONE]}, r"log_info is a list: write \{'name': tensor"),
            ({"output_info": VECTOR}, r"output_info is a Tensor: write \{'name': tensor"),
            ({"export_spec": {"x": ONE}}, r"export_spec is a dict: write mox.ExportSpec"),
            ({"log_info": {"y": VECTOR}}, r"log_info\['y'\] has shape \[3\]: log numbers, such as x.mean"),
        ],
    )
    def test_bad_parts_say_what_to_write(self, given, words):
        with pytest.raises(FunctionError, match=words):
            mox.ModelSpec(**given).check("EVAL")

    @pytest.mark.parametrize(
        ("mode", "part"),
        [("TRAIN", "loss"), ("EVAL", "log_info"), ("PREDICT", "output_info"), ("EXPORT", "export_spec")],
    )
    def test_each_mode_needs_its_part(self, mode, part):
        with pytest.raises(FunctionError, match=f"in {mode} mode the model_fn's ModelSpec needs {part}: add it"):
            mox.ModelSpec().check(mode)
        export = mox.ExportSpec({"x": ONE}, {"y": ONE})
        value = {"loss": ONE, "log_info": {"a": ONE}, "output_info": {"p": ONE}, "export_spec": export}[part]
        mox.ModelSpec(**{part: value}).check(mode)

    def test_an_empty_list_of_losses_is_none(self):
        with pytest.raises(FunctionError, match="needs loss"):
            mox.ModelSpec(loss=[]).check("TRAIN")

    @pytest.mark.parametrize(
        ("loss", "scopes", "expected"),
        [
            (ONE, None, [None]),
            (ONE, ["a", "b"], [["a", "b"]]),
            ([ONE, ONE], None, [None, None]),
            ([ONE, ONE], [["a"], ["b", "c"]], [["a"], ["b", "c"]]),
            ((ONE, ONE), ["a", "b"], [["a"], ["b"]]),
        ],
    )
    def test_scopes_of_losses(self, loss, scopes, expected):
        assert mox.ModelSpec(loss=loss, var_scopes=scopes).scopes_of_losses() == expected

    def test_as_many_lists_of_scopes_as_losses(self):
        with pytest.raises(FunctionError, match="2 losses, but var_scopes has 1: write a list for each loss"):
            mox.ModelSpec(loss=[ONE, ONE], var_scopes=[["a"]]).scopes_of_losses()


class TestExportSpec:
    @pytest.mark.parametrize("version", [-1, 1, 7, "model"])
    def test_versions_are_numbers_or_names(self, version):
        assert mox.ExportSpec({"x": ONE}, {"y": ONE}, version).version == version

    def test_the_next_version_by_default(self):
        assert mox.ExportSpec(inputs_dict={"x": ONE}, outputs_dict={"y": ONE}).version == -1

    @pytest.mark.parametrize(
        ("inputs", "outputs", "version", "words"),
        [
            ({}, {"y": ONE}, 1, r"inputs_dict is \{\}: write \{'name': tensor"),
            ({"x": ONE}, [ONE], 1, r"outputs_dict is \[.*\]: write \{'name': tensor"),
            ({"x": 3}, {"y": ONE}, 1, r"inputs_dict\['x'\] is a int: give a tensor"),
            ({"x": ONE}, {"y": ONE}, 0, "version=0: write a number from 1 on, a name, or -1"),
            ({"x": ONE}, {"y": ONE}, "", "version='': write a number"),
            ({"x": ONE}, {"y": ONE}, True, "version=True: write a number"),
            ({"x": ONE}, {"y": ONE}, 1.5, "version=1.5: write a number"),
            ({"x": ONE}, {"y": ONE}, -2, "version=-2: write a number"),
        ],
    )
    def test_bad_ones_say_what_to_write(self, inputs, outputs, version, words):
        with pytest.raises(FunctionError, match=words):
            mox.ExportSpec(inputs, outputs, version)
