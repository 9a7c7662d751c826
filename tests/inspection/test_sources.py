from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from plait.errors import CheckpointError
from plait.inspection import sources
from plait.inspection.sources import (
    Entry,
    Tensors,
    from_safetensors,
    looks_like_safetensors,
    tensor_grid,
    tensors_facts,
)


def test_names_types_shapes_and_sizes(tmp_path):
    tensors = {
        "b": torch.ones(2, 3), "a": torch.tensor(1), "h": torch.ones(4, dtype=torch.bfloat16), "t": torch.ones(3) > 0,
        "f": torch.ones(5).to(torch.float8_e4m3fn), "none": torch.empty(0, 7),
    }  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    found = from_safetensors(tmp_path / "x.safetensors")
    assert list(found.entries) == sorted(tensors)
    for name, entry in found.entries.items():
        tensor = tensors[name]
        assert entry == Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
    for name, tensor in found.each(found.entries):
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor.double(), tensors[name].double())


def test_few_are_read_at_a_time(monkeypatch):
    monkeypatch.setattr(sources, "_GROUP_BYTES", 10)
    asked = []

    def read(names):
        asked.append(list(names))
        return {name: torch.zeros(1) for name in names}

    sizes = {"a": 4, "b": 4, "c": 4, "d": 100, "e": 1, "f": 10}
    entries = {name: Entry("uint8", (size,), size, readable=name != "e") for name, size in sizes.items()}
    tensors = Tensors("test", None, entries, read)
    assert [name for name, _ in tensors.each(entries)] == ["a", "b", "c", "d", "f"]
    assert asked == [["a", "b"], ["c"], ["d"], ["f"]]
    assert list(tensors.each([])) == []


def test_a_type_that_torch_does_not_read_is_listed(tmp_path):
    header = b'{"q":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    (tmp_path / "q.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    found = tensors_facts(from_safetensors(tmp_path / "q.safetensors"), stats=True)
    assert found["tensors"] == [{"name": "q", "dtype": "F4", "shape": [4], "bytes": 2, "statistics": None}]
    assert tensor_grid(found).rows == [["q", "F4", "[4]", "2", *["-"] * 7]]


@pytest.mark.parametrize("cut", [-1, 9, 4])
def test_a_file_that_was_cut_is_an_error(tmp_path, cut):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"x\.safetensors cannot be read"):
        from_safetensors(path)


def test_what_looks_like_safetensors(tmp_path):
    for data, looks in [(b"", False), (b"\x02" + bytes(7) + b"{}", True), (b"\x03" + bytes(7) + b"{}", False)]:
        (tmp_path / "x").write_bytes(data)
        assert looks_like_safetensors(tmp_path / "x") is looks
