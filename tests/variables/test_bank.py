from __future__ import annotations

import importlib.util
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plait.errors import CheckpointError, ConfigError, MismatchError
from plait.variables import bank
from plait.variables.bank import read_variables
from plait.variables.checkpoint import CheckpointDir

SPEC = importlib.util.spec_from_file_location("v1_writer", Path(__file__).with_name("v1_writer.py"))
v1_writer = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(v1_writer)
writer = v1_writer.base


def make_file(path: Path, **tensors: torch.Tensor) -> str:
    save_file({name.replace("__", "/"): tensor for name, tensor in tensors.items()}, path)
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    ones = {name: torch.ones(2) for name in ("a__biases", "a__weights", "b__biases", "b__weights", "only__file")}
    return make_file(tmp_path / "w.safetensors", **ones)


def make_model() -> dict[str, torch.Tensor]:
    names = ("a/biases", "a/weights", "b/biases", "b/weights", "only/model")
    return {name: torch.nn.Parameter(torch.zeros(2)) for name in names}


def item(path: str, load: object, exclude: object = ()) -> dict[str, object]:
    return {"load": load, "exclude": list(exclude), "path": path}


def statuses(matches: list[bank.Match]) -> dict[str, str]:
    return {found.name: found.status for found in matches}


def matched(matches: list[bank.Match]) -> set[str]:
    return {found.name for found in matches if found.status == "matched"}


def test_a_checkpoint_directory_gives_its_newest_variables(tmp_path: Path):
    directory = CheckpointDir(tmp_path / "run")
    old = directory.save({"variables": {"fc/weight": torch.zeros(2)}}, step=1)
    directory.save(
        {"variables": {"fc/weight": torch.ones(2), "v1.5": torch.ones(1)}, "optimizer": torch.ones(3)}, step=2
    )
    newest = read_variables(tmp_path / "run")
    assert set(newest) == {"fc/weight", "v1.5"}
    assert newest["fc/weight"].tolist() == [1, 1]
    assert read_variables(str(old))["fc/weight"].tolist() == [0, 0]


def test_a_torn_newest_is_passed_over(tmp_path: Path):
    directory = CheckpointDir(tmp_path)
    directory.save({"variables": {"w": torch.zeros(2)}}, step=1)
    newest = directory.save({"variables": {"w": torch.ones(2)}}, step=2)
    (newest / "state.json").unlink()
    with pytest.warns(UserWarning, match="state.json is missing"):
        assert read_variables(tmp_path)["w"].tolist() == [0, 0]
    with pytest.raises(CheckpointError, match="state.json is missing"):
        read_variables(newest)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: {"state_dict": d, "epoch": 3}, lambda d: {"model": d}])
def test_a_saved_state_dict_with_and_without_nesting(tmp_path: Path, wrap):
    layer = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.save(wrap(layer.state_dict()), tmp_path / "w.pt")
    read = read_variables(tmp_path / "w.pt")
    assert set(read) == {name.replace(".", "/") for name in layer.state_dict()}
    assert torch.equal(read["0/weight"], layer[0].weight)


def test_a_layer_called_model_is_not_a_nesting(tmp_path: Path):
    torch.save(OrderedDict({"model": torch.ones(1), "state_dict": torch.ones(2)}), tmp_path / "w.pt")
    assert set(read_variables(tmp_path / "w.pt")) == {"model", "state_dict"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (3, "holds a int"),
        ({"a": 1}, "'a' is a int"),
        ({1: torch.ones(1)}, "1 is a Tensor"),
        ({"a.b": torch.ones(1), "a/b": torch.ones(1)}, "'a/b' twice"),
    ],
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, content: object, words: str):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=words) as caught:
        read_variables(tmp_path / "w.pt")
    assert str(tmp_path / "w.pt") in str(caught.value)


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil",))


def test_a_file_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, "w.pt")
    with pytest.raises(CheckpointError, match=r"w.pt cannot be read \(UnpicklingError\).*more than weights") as caught:
        read_variables("w.pt")
    assert "weights_only" not in str(caught.value)
    assert os.listdir() == ["w.pt"]


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str):
    with pytest.raises(CheckpointError, match=f"there is no .*{name}"):
        read_variables(tmp_path / name)
    (tmp_path / name).write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        read_variables(tmp_path / name)


def test_a_directory_without_variables_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        read_variables(tmp_path)
    CheckpointDir(tmp_path).save({"step": 1}, step=1)
    with pytest.raises(CheckpointError, match="no variables"):
        read_variables(tmp_path)


@pytest.mark.parametrize("config", [None, {}, []])
def test_nothing_to_load(config: object):
    assert bank.match(config, make_model()) == []


@pytest.mark.parametrize(
    ("load", "exclude", "expected"),
    [
        (["a/biases", "b/weights"], [], {"a/biases", "b/weights"}),
        (["*"], [], {"a/biases", "a/weights", "b/biases", "b/weights"}),
        (["*/biases"], ["a/*"], {"b/biases"}),
        (["[ab]/w*"], ["nothing/like/this"], {"a/weights", "b/weights"}),
    ],
)
def test_the_documents_patterns(file: str, load: list[str], exclude: list[str], expected: set[str]):
    for config in ({"ckpt0": item(file, load, exclude)}, [item(file, load, exclude)]):
        matches = bank.match(config, make_model())
        assert matched(matches) == expected
        assert [found.name for found in matches] == list(make_model())
        assert {found.source for found in matches if found.status == "missing"} == {"-"}


def test_patterns_mind_their_case(file: str):
    with pytest.raises(ConfigError, match=r"'A/\*'"):
        bank.match([item(file, ["A/*"])], make_model())


def test_renames(file: str):
    load = {"only/file": "only/model", "a/biases": "nowhere", "b/biases": "b/weights"}
    matches = bank.match({"x": item(file, load, ["b/*"])}, make_model())
    by_name = {found.name: found for found in matches}
    assert matched(matches) == {"only/model"}
    assert by_name["only/model"].file_name == "only/file"
    assert (by_name["nowhere"].status, by_name["nowhere"].source) == ("missing", file)
    with pytest.raises(ConfigError, match=r"'only/fil', which is not in .*Nearest: 'only/file'"):
        bank.match([item(file, {"only/fil": "only/model"})], make_model())


def test_renames_of_all_that_begin_so(file: str):
    model = {f"net/{name}": tensor for name, tensor in make_model().items()}
    matches = bank.match([item(file, {"a/*": "net/a/*"})], model)
    assert matched(matches) == {"net/a/biases", "net/a/weights"}
    assert matched(bank.match([item(file, {"*": "net/*"}, ["b/*"])], model)) == {"net/a/biases", "net/a/weights"}
    with pytest.raises(ConfigError, match=r"'c/\*', which is not in"):
        bank.match([item(file, {"c/*": "net/c/*"})], model)


def test_files_that_were_read_already_are_not_read_again(file: str):
    variables = bank.read_variables(file)
    matches = bank.match([item("nowhere", ["a/*"])], make_model(), {"nowhere": variables})
    assert matched(matches) == {"a/biases", "a/weights"}


def test_later_entries_win(tmp_path: Path, file: str):
    second = make_file(tmp_path / "second.safetensors", a__biases=torch.full((2,), 5.0), other=torch.full((2,), 6.0))
    model = make_model()
    config = {"x": item(file, ["*"]), "y": item(second, ["a/*"]), "z": item(second, {"other": "b/biases"})}
    bank.apply(bank.match(config, model), model)
    assert {name: tensor[0].item() for name, tensor in model.items()} == {
        "a/biases": 5, "a/weights": 1, "b/biases": 6, "b/weights": 1, "only/model": 0,
    }  # fmt: skip
    matches = bank.match(list(reversed(list(config.values()))), make_model())
    assert {found.source for found in matches if found.status == "matched"} == {file}


def test_a_file_is_read_once(file: str, monkeypatch: pytest.MonkeyPatch):
    reads = []
    monkeypatch.setattr(bank, "read_variables", lambda path: reads.append(path) or read_variables(path))
    bank.match([item(file, ["a/*"]), item(file, ["b/*"])], make_model())
    assert reads == [file]


@pytest.mark.parametrize(
    ("load", "exclude", "words"),
    [
        (["c/*"], [], r"'c/\*', which matches no variable in .*w.safetensors.*Nearest"),
        (["*", "a/biasses"], [], r"'a/biasses'.*Nearest: 'a/biases'"),
        (["only/file"], [], r"none that the model has; rename with a dict.*'only/model'"),
        (["a/*"], ["a/*"], r"exclude takes out everything"),
    ],
)
def test_a_pattern_that_loads_nothing_is_an_error(file: str, load: list[str], exclude: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        bank.match([item(file, load, exclude)], make_model())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("x", "config is 'x'"),
        (3, "config is 3"),
        ({"load": ["*"], "exclude": [], "path": "x"}, r"entry 'load' is \['\*'\]"),
        ([{"load": ["*"], "path": "x"}], r"entry 0 lacks \['exclude'\]"),
        ({"k": {"load": ["*"], "exclude": [], "path": "x", "paht": 1}}, r"entry 'k' .*unknown keys \['paht'\]"),
        ([{"load": "*", "exclude": [], "path": "x"}], r"load='\*'; write a list"),
        ([{"load": {"a": 1}, "exclude": [], "path": "x"}], "load={'a': 1}"),
        ([{"load": ["*"], "exclude": None, "path": "x"}], "exclude=None; write a list"),
        ([{"load": ["*"], "exclude": [], "path": 5}], "path=5"),
    ],
)
def test_a_bad_config_is_named(config: object, words: str):
    with pytest.raises(ConfigError, match=words):
        bank.match(config, make_model())


def test_wrong_shapes_load_nothing_and_are_all_listed(file: str):
    model = make_model()
    model["a/biases"], model["b/weights"] = torch.zeros(3), torch.zeros(2, 1)
    matches = bank.match([item(file, ["*"])], model)
    assert statuses(matches)["a/biases"] == statuses(matches)["b/weights"] == "wrong shape"
    with pytest.raises(MismatchError) as caught:
        bank.apply(matches, model)
    assert "a/biases from " in str(caught.value)
    assert "model (2, 1), file (2,)" in str(caught.value)
    assert all(not tensor.any() for tensor in model.values())


def test_apply_converts_and_keeps_the_live_tensors(tmp_path: Path):
    path = make_file(tmp_path / "half.safetensors", w=torch.full((2,), 0.5, dtype=torch.bfloat16))
    weight = torch.nn.Parameter(torch.zeros(2))
    address = weight.data_ptr()
    bank.apply(bank.match([item(path, ["w"])], {"w": weight}), {"w": weight})
    assert (weight.tolist(), weight.data_ptr(), weight.dtype) == ([0.5, 0.5], address, torch.float32)
    assert weight.requires_grad


def test_the_report_is_one_plain_table(file: str):
    model = make_model()
    model["b/weights"] = torch.zeros(9)
    config = [item(file, ["*"]), item(file, {"only/file": "only/model", "a/biases": "[red]nowhere"})]
    lines = bank.report(bank.match(config, model)).splitlines()
    assert lines[0].split() == ["variable", "from", "status", "shape"]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:]}
    assert rows["a/biases"] == f"{file} matched (2,)"
    assert rows["b/weights"] == f"{file} wrong shape model (9,), file (2,)"
    assert rows["only/model"] == f"{file} (only/file) matched (2,)"
    assert rows["[red]nowhere"] == f"{file} (a/biases) missing (2,)"
    assert len(rows) == 6


def test_the_report_names_what_nothing_loads(file: str):
    report = bank.report(bank.match([item(file, ["a/*"])], make_model()))
    assert ["only/model", "-", "missing", "(2,)"] in [line.split() for line in report.splitlines()]


def test_the_step_of_a_checkpoint_is_known_by_its_name(tmp_path: Path, file: str):
    directory = CheckpointDir(tmp_path / "run")
    old = directory.save({"variables": {}}, step=7)
    directory.save({"variables": {}}, step=40)
    assert [bank.read_step(path) for path in (tmp_path / "run", old, file, tmp_path / "none")] == [40, 7, 0, 0]


BUNDLE = {
    "net/conv/weights": torch.arange(24.0).reshape(1, 2, 3, 4),
    "net/conv/weights/Momentum": torch.ones(1, 2, 3, 4),
    "net/conv/biases": torch.arange(4.0),
    "net/v1.5/depthwise_weights": torch.arange(4.0).reshape(1, 1, 2, 2),
    "net/logits/weights": torch.arange(6.0).reshape(2, 3),
    "global_step": torch.tensor(1234),
}


def test_a_tensorflow_checkpoint_is_turned_and_keeps_its_names(tmp_path: Path):
    prefix = writer.write_bundle(tmp_path / "model.ckpt-1234", BUNDLE)
    for path in (prefix, str(prefix), f"{prefix}.index", tmp_path):
        read = read_variables(path)
        assert set(read) == set(BUNDLE)
        assert bank.read_step(path) == 1234
    assert torch.equal(read["net/conv/weights"], BUNDLE["net/conv/weights"].permute(3, 2, 0, 1))
    assert read["net/v1.5/depthwise_weights"].flatten().tolist() == [0, 1, 2, 3]
    assert torch.equal(read["net/logits/weights"], BUNDLE["net/logits/weights"].T)


def test_what_the_model_lacks_of_a_tensorflow_checkpoint_does_no_harm(tmp_path: Path):
    prefix = writer.write_bundle(tmp_path / "m", BUNDLE)
    model = {"net/conv/weights": torch.zeros(4, 3, 1, 2), "net/logits/weights": torch.zeros(3, 2)}
    bank.apply(bank.match([item(str(prefix), ["*"])], model), model)
    assert torch.equal(model["net/conv/weights"], BUNDLE["net/conv/weights"].permute(3, 2, 0, 1))
    matches = bank.match([item(str(prefix), ["*"])], {"net/logits/weights": torch.zeros(3, 2, 1, 1)})
    assert statuses(matches) == {"net/logits/weights": "wrong shape"}


def test_plaits_own_checkpoints_come_first(tmp_path: Path):
    writer.write_bundle(tmp_path / "model.ckpt-1234", BUNDLE)
    CheckpointDir(tmp_path).save({"variables": {"w": torch.ones(2)}}, step=5)
    assert set(read_variables(tmp_path)) == {"w"}
    assert bank.read_step(tmp_path) == 5


@pytest.mark.parametrize("step", [None, torch.tensor([1, 2])])
def test_a_tensorflow_checkpoint_without_a_step(tmp_path: Path, step: torch.Tensor | None):
    tensors = {"a": torch.ones(1)} | ({} if step is None else {"global_step": step})
    assert bank.read_step(writer.write_bundle(tmp_path / "m", tensors)) == 0


@pytest.mark.parametrize("compress", [False, True])
def test_a_tensorflow_checkpoint_of_the_older_kind(tmp_path: Path, compress: bool):
    file = v1_writer.write_v1(tmp_path / "inception_v3.ckpt", BUNDLE, compress=compress)
    whole = read_variables(writer.write_bundle(tmp_path / "newer", BUNDLE))
    for path in (file, str(file)):
        read = read_variables(path)
        assert read.keys() == whole.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in whole.items())
        assert bank.read_step(path) == 1234
    model = {"net/conv/weights": torch.zeros(4, 3, 1, 2)}
    bank.apply(bank.match([item(str(file), ["net/*"])], model), model)
    assert torch.equal(model["net/conv/weights"], BUNDLE["net/conv/weights"].permute(3, 2, 0, 1))


def test_the_older_kind_in_several_files_and_by_its_directory(tmp_path: Path):
    prefix = v1_writer.write_v1(tmp_path / "model.ckpt-1234", BUNDLE, {"net/conv/biases": 2}, files=2)
    for path in (prefix, f"{prefix}-00001-of-00002", f"{prefix}-?????-of-00002", tmp_path):
        assert read_variables(path)["net/conv/biases"].tolist() == [0, 1, 2, 3]
        assert bank.read_step(path) == 1234
    CheckpointDir(tmp_path).save({"variables": {"w": torch.ones(2)}}, step=5)
    assert set(read_variables(tmp_path)) == {"w"}
    assert bank.read_step(tmp_path) == 5


def test_a_table_that_is_no_checkpoint_is_named(tmp_path: Path):
    (tmp_path / "x.ckpt").write_bytes(writer.table([(b"", b"")]))
    with pytest.raises(CheckpointError, match=r"x.ckpt: does not tell what is in it, so it is no checkpoint"):
        read_variables(tmp_path / "x.ckpt")
