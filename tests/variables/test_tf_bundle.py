"""Bundles of the tests' own writer, and one of TensorFlow's; with TensorFlow: test_tf_bundle_tensorflow.py."""

from __future__ import annotations

import base64
import importlib.util
import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import CheckpointError
from plait.variables import tf_bundle
from plait.variables.tf_bundle import is_bundle, list_bundle, read_bundle, to_torch_layout

SPEC = importlib.util.spec_from_file_location("bundle_writer", Path(__file__).with_name("bundle_writer.py"))
writer = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(writer)

TENSORFLOWS_INDEX = (
    "AAAGCAEaAggBAA8WAHdvcmRzAAEBAoDAQYCCCAUSCBICCEESAggCIFEohAI1V7ggbQoGF8BBwEGAgggFEggSAghBEgIIAiDVAiiEAjWxKDGsAAsLZ2xv"
    "YmFsX3N0ZXAICRIAKAg1Zw5xVgAGEWxhYmVscwgHEgQSAggCIAgoCTXp5DaFAA8RbmV0L2NvbnYvYmlhc2VzCAESBBICCAMgESgMNSPtLsoJBx13ZWln"
    "aHRzCAESEBICCAESAggCEgIIAhICCAMgHSgwNdemVdwEBBFoYWxmCA4SBBICCAIgTSgENS5KVvIABSN3b3JkcwgFEgkSAwiCARICCAI6CAoCEEEKAhAC"
    "OgoKBAhBEEEKAhACAAAAAAEAAAAAKTsK+wAAAAABAAAAAMDyobAAAQN4AJkCAAAAAAEAAAAAUd1TFJ4CCKsCDwAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAABX+4CLJHVH2w=="
)
"""Of TensorFlow 2.21: `words` lies in two slices of 65 rows, `labels` is text."""

TENSORS = {
    "a/weights": torch.arange(6.0).reshape(2, 3),
    "a/biases": torch.tensor([1.5]),
    "a/weights/Momentum": torch.full((2, 3), 0.25),
    "cut": torch.arange(10, dtype=torch.int32).reshape(5, 2),
    "flags": torch.tensor([True, False, True]),
    "global_step": torch.tensor(77),
    "none": torch.empty(0, 4),
}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return writer.write_bundle(tmp_path / "model.ckpt-77", TENSORS, parts={"cut": 2})


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in wanted.items()
    )


def index_of(prefix: Path) -> Path:
    return Path(f"{prefix}.index")


def data_of(prefix: Path) -> Path:
    return Path(f"{prefix}.data-00000-of-00001")


def test_what_tensorflow_wrote_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    words = torch.cat([torch.arange(130), torch.arange(130) + 65000]).to(torch.int16).reshape(130, 2)
    wanted = {
        "global_step": torch.tensor(1234),
        "net/conv/biases": torch.tensor([0.5, -1.0, 2.0]),
        "net/conv/weights": torch.arange(12.0).reshape(1, 2, 2, 3),
        "net/half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "words": words,
    }
    labels = torch.zeros(9, dtype=torch.uint8)
    parts = [
        wanted["global_step"],
        labels,
        *[wanted[f"net/{name}"] for name in ("conv/biases", "conv/weights", "half")],
    ]
    parts += [words]
    index_of(tmp_path / "m").write_bytes(base64.b64decode(TENSORFLOWS_INDEX))
    data_of(tmp_path / "m").write_bytes(b"".join(map(writer.raw, parts)))
    with caplog.at_level(logging.INFO, "plait"):
        assert same(read_bundle(tmp_path / "m"), wanted)
    assert "'labels' (string)" in caplog.text
    assert [(entry.dtype, entry.nbytes) for name, entry in list_bundle(tmp_path).items() if name == "labels"] == [
        ("string", 9)
    ]


def test_every_type_comes_back(tmp_path: Path):
    numbers = torch.tensor([[0, 1, 2], [3, 100, 127]])
    tensors = {f"x/{dtype}": numbers.to(dtype) for dtype in writer.CODES}
    assert same(read_bundle(writer.write_bundle(tmp_path / "m", tensors)), tensors)


SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(shapes=st.dictionaries(NAMES, SHAPES, max_size=12), shards=st.integers(1, 3), data=st.data())
def test_any_names_shapes_shards_and_slices(tmp_path_factory, shapes, shards, data):
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    cut = [name for name, shape in shapes.items() if shape and shape[0]]
    parts = {name: data.draw(st.integers(1, 4)) for name in cut if data.draw(st.booleans())}
    path = tmp_path_factory.mktemp("bundle")
    assert same(read_bundle(writer.write_bundle(path / "m", tensors, shards, parts)), tensors)


@pytest.mark.parametrize("number", [0, 1, 63, 64, 8191, 8192, 2**20 - 1, 2**20, 2**62, -1, -64, -65])
def test_ordered_numbers_sort_as_they_are(number: int):
    code = tf_bundle._ordered
    assert code(number - 1) < code(number) < code(number + 1)
    assert len(code(63)) == len(code(-64)) == 1
    assert len(code(64)) == len(code(-65)) == 2


def test_where_a_bundle_is_found(tmp_path: Path, prefix: Path):
    assert is_bundle(prefix)
    assert is_bundle(str(index_of(prefix)))
    assert is_bundle(tmp_path)
    assert is_bundle(data_of(prefix))
    assert not is_bundle(tmp_path / "other")
    assert same(read_bundle(index_of(prefix)), read_bundle(str(tmp_path)))
    writer.write_bundle(tmp_path / "model.ckpt-99", {"a": torch.ones(1)})
    assert not is_bundle(tmp_path)
    with pytest.raises(CheckpointError, match="is no TensorFlow checkpoint; write its prefix"):
        read_bundle(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        'model_checkpoint_path: "model.ckpt-77"\nall_model_checkpoint_paths: "other"',
        'all_model_checkpoint_paths: "x"\n  model_checkpoint_path:"model.ckpt\\0557\\67"',
        'model_checkpoint_path: "/somewhere/else/model.ckpt-77"',
    ],
)
def test_the_newest_is_what_the_file_checkpoint_says(tmp_path: Path, prefix: Path, text: str):
    writer.write_bundle(tmp_path / "other", {"a": torch.ones(1)})
    (tmp_path / "checkpoint").write_text(text)
    assert is_bundle(tmp_path)
    assert "a/weights" in read_bundle(tmp_path)


def test_a_file_checkpoint_that_names_nothing(tmp_path: Path, prefix: Path):
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "gone"')
    with pytest.raises(CheckpointError, match=r"gone.index: is named by the file `checkpoint`"):
        read_bundle(tmp_path)
    (tmp_path / "checkpoint").write_bytes(b'model_checkpoint_path: "\\8\\000\\377"')
    with pytest.raises(CheckpointError, match="is not there"):
        read_bundle(tmp_path)
    (tmp_path / "checkpoint").write_bytes(b"\xff\x00 not this")
    assert "a/weights" in read_bundle(tmp_path)


def test_only_the_names_asked_for(prefix: Path):
    assert same(read_bundle(prefix, ["cut", "a/biases"]), {name: TENSORS[name] for name in ("cut", "a/biases")})
    assert read_bundle(prefix, []) == {}
    with pytest.raises(CheckpointError, match=r"has no variable 'b'; it has 'a/biases'"):
        read_bundle(prefix, ["b"])


def test_text_is_passed_over_and_refused_by_name(tmp_path: Path):
    rows, data = writer.bundle_rows({"a": torch.ones(2)})
    rows |= {b"graph": writer.entry(7, (), data=b"xyz"), b"odd": writer.entry(99, (2,), size=1)}
    path = writer.write_files(tmp_path / "m", rows, data)
    assert set(read_bundle(path)) == {"a"}
    assert {name: entry.dtype for name, entry in list_bundle(path).items()} == {
        "a": "float32", "graph": "string", "odd": "type 99",
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="has 'graph' as string, which cannot be read"):
        read_bundle(path, ["graph"])


def test_a_byte_that_is_neither_true_nor_false_is_true(tmp_path: Path):
    path = writer.write_files(
        tmp_path / "m", {b"": writer.header(), b"x": writer.entry(10, (3,), data=b"\2\0\1")}, [b"\2\0\1"]
    )
    assert read_bundle(path)["x"].long().tolist() == [1, 0, 1]


ONE = torch.ones(2, 2)
BAD_ROWS: dict[str, tuple[Callable[[], dict[bytes, bytes]], str]] = {
    "no header": (lambda: {b"x": writer.entry(1)}, "has no header"),
    "big-endian": (lambda: {b"": writer.header(big_endian=1)}, "big-endian machine; save it again"),
    "newer": (lambda: {b"": writer.header(needs=2)}, "needs a reader of version 2"),
    "no shards": (lambda: {b"": writer.header(shards=0)}, "names 0 shards"),
    "size": (lambda: {b"x": writer.entry(1, (2, 2), size=15)}, r"'x' has 15 bytes, but float32 .*\(2, 2\) has 16"),
    "negative": (lambda: {b"x": writer.entry(1, (-1,), size=4)}, r"'x' has the shape \(-1,\)"),
    "huge": (lambda: {b"x": writer.entry(1, (2**40, 2**40), size=0)}, "which no tensor has"),
    "huge and empty": (lambda: {b"x": writer.entry(1, (2**40, 0, 2**40), size=0)}, "which no tensor has"),
    "rank": (lambda: {b"x": writer.entry(1, [1] * 99, size=4)}, "which no tensor has"),
    "shard": (lambda: {b"x": writer.entry(1, (), size=4, shard=1)}, "lies in shard 1 of 1"),
    "offset": (lambda: {b"x": writer.entry(1, (), size=4, offset=-1)}, "4 bytes at -1: no such place"),
    "past the end": (lambda: {b"x": writer.entry(1, (), size=4, offset=13)}, "has 16 bytes, the index tells of 17"),
    "more than there is": (
        lambda: {bytes([65 + i]): writer.entry(1, (2, 2), data=writer.raw(ONE)) for i in range(9)},
        "has 16 bytes, the index tells of 144",
    ),
    "terabytes": (lambda: {b"x": writer.entry(1, (2**40,), size=2**42)}, "has 16 bytes, the index tells of 4398"),
    "no slice": (lambda: {b"x": writer.entry(1, (4,), slices=[[(0, 4)]])}, r"slice \(\(0, 4\),\) that is not in"),
    "cut field": (lambda: {b"x": writer.field(2, b"abc")[:-1]}, "runs past its entry"),
    "group": (lambda: {b"x": b"\x0b"}, "wire type 3"),
    "endless": (lambda: {b"x": b"\x08" + b"\xff" * 11}, "does not end"),
    "not text": (lambda: {b"\xff\xfe": writer.entry(1, (), size=4)}, "UnicodeDecodeError"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, case: str):
    make, words = BAD_ROWS[case]
    rows = make() if case == "no header" else {b"": writer.header(), **make()}
    path = writer.write_files(tmp_path / "m", rows, [writer.raw(ONE)])
    with pytest.raises(CheckpointError, match=words) as caught:
        read_bundle(path)
    assert str(tmp_path / "m.") in str(caught.value)


BAD_SLICES = {
    "outside": ([[(0, 2), (0, -1)], [(3, 2), (0, -1)]], "does not fit it"),
    "rank": ([[(0, 2)], [(2, 2)]], "does not fit it"),
    "too few": ([[(0, 2), (0, -1)]], "more or fewer numbers"),
    "twice": ([[(0, 2), (0, -1)], [(0, 2), (0, -1)]], "overlap and leave gaps"),
}


@pytest.mark.parametrize("case", BAD_SLICES)
def test_slices_that_do_not_make_a_whole_are_refused(tmp_path: Path, case: str):
    slices, words = BAD_SLICES[case]
    part = writer.raw(torch.ones(2, 2))
    rows = {b"": writer.header(), b"x": writer.entry(1, (4, 2), slices=slices)}
    for extents in slices:
        rows[writer.slice_key("x", extents)] = writer.entry(1, (2, 2), data=part)
    path = writer.write_files(tmp_path / "m", rows, [part * 2])
    with pytest.raises(CheckpointError, match=words):
        read_bundle(path)


def test_a_slice_of_slices_is_refused(tmp_path: Path):
    extents, data = [[(0, 2)], [(2, 2)]], bytes(8)
    rows = {b"": writer.header(), b"x": writer.entry(1, (4,), slices=extents)}
    rows |= {writer.slice_key("x", part): writer.entry(1, (2,), data=data, slices=[part]) for part in extents}
    with pytest.raises(CheckpointError, match="does not fit it"):
        read_bundle(writer.write_files(tmp_path / "m", rows, [data]))


def rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


def test_an_index_that_is_no_table_is_named(prefix: Path):
    rewrite(index_of(prefix), lambda data: data[:-1])
    with pytest.raises(CheckpointError, match=r"ckpt-77.index: does not end as a table does"):
        read_bundle(prefix)


def test_limits_are_checked_before_anything_is_unpacked(prefix: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tf_bundle, "_MAX_INDEX", 20)
    with pytest.raises(CheckpointError, match="20 are allowed"):
        read_bundle(prefix)


def test_data_that_is_missing_or_altered(prefix: Path):
    rewrite(data_of(prefix), lambda data: bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(CheckpointError, match=r"data-00000-of-00001: 'a/weights' was altered, the checksum"):
        read_bundle(prefix)
    assert read_bundle(prefix, ["a/biases"])["a/biases"].tolist() == [1.5]
    data_of(prefix).unlink()
    with pytest.raises(CheckpointError, match="data-00000-of-00001 cannot be read"):
        read_bundle(prefix)
    assert set(list_bundle(prefix)) == set(TENSORS)


def test_a_damaged_bundle_is_refused_or_read_as_it_was(prefix: Path):
    """Some bytes mean nothing, such as the padding of the footer; none may change what is read."""
    draw = random.Random(7)
    refused = 0
    for file in (index_of(prefix), data_of(prefix)):
        good = file.read_bytes()
        for turn in range(1000):
            bad = bytearray(good)
            if turn % 5 == 0:
                del bad[draw.randrange(len(bad)) :]
            else:
                bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
            file.write_bytes(bad)
            try:
                assert same(read_bundle(prefix), TENSORS)
            except CheckpointError:
                refused += 1
        file.write_bytes(good)
    assert refused > 1700
    assert same(read_bundle(prefix), TENSORS)


def test_nonsense_with_the_right_checksums_is_refused_or_read(prefix: Path):
    """Whoever alters a file can mend its checksums too: the parser has to stand by itself."""
    draw = random.Random(8)
    rows, data = writer.bundle_rows(TENSORS, parts={"cut": 2})
    good = writer.block(sorted(rows.items()), 4)
    refused = 0
    for _ in range(1500):
        bad = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        index_of(prefix).write_bytes(writer.assemble([(b"\xff", bytes(bad))]))
        try:
            read_bundle(prefix)
        except CheckpointError:
            refused += 1
    assert refused > 700


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize("leaf", ["weights", "kernel", "pointwise_weights", "pointwise_kernel"])
@pytest.mark.parametrize("end", ["", "/Adam_1", "/ExponentialMovingAverage", "/.ATTRIBUTES/VARIABLE_VALUE"])
def test_weights_are_turned(leaf: str, end: str):
    array = numbered(2, 3, 4, 5)
    turned = to_torch_layout(f"net/{leaf}{end}", array)
    assert turned.shape == (5, 4, 2, 3)
    assert turned.is_contiguous()
    assert turned[3, 2, 1, 0] == array[1, 0, 2, 3]
    assert torch.equal(to_torch_layout(leaf, numbered(2, 3)), numbered(2, 3).T)


@pytest.mark.parametrize("leaf", ["depthwise_weights", "depthwise_kernel"])
def test_depthwise_channels_keep_their_order(leaf: str):
    array = numbered(3, 2, 4, 5)
    turned = to_torch_layout(f"net/{leaf}", array)
    assert turned.shape == (20, 1, 3, 2)
    assert all(turned[c * 5 + m, 0, 1, 1] == array[1, 1, c, m] for c in range(4) for m in range(5))


@pytest.mark.parametrize("name", ["net/biases", "weights/other", "my_weights", "Adam", "net/BatchNorm/gamma"])
def test_what_is_no_weight_stays(name: str):
    for array in (numbered(2, 3, 4, 5), numbered(2, 3), numbered(4)):
        assert to_torch_layout(name, array) is array


@pytest.mark.parametrize("end", ["", "/Ftrl", "/Ftrl_1"])
@pytest.mark.parametrize("scope", ["linear_model", "linear/linear_model", "tower/linear_model_2"])
def test_the_rows_of_a_linear_model_stay_rows(scope: str, end: str):
    array = numbered(7, 2)
    assert to_torch_layout(f"{scope}/city/weights{end}", array) is array
    assert torch.equal(to_torch_layout(f"my_{scope.replace('/', '_')}/weights{end}", array), array.T)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (1, 2, 3, 4, 5)])
def test_other_ranks_stay(shape: tuple[int, ...]):
    assert to_torch_layout("net/weights", numbered(*shape)).shape == shape


def test_a_dense_layer_as_a_convolution_stays_one():
    assert to_torch_layout("vgg_16/fc8/weights", numbered(1, 1, 6, 7)).shape == (7, 6, 1, 1)
