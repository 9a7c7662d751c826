"""Checkpoints of the tests' own writer, and one of TensorFlow's; with TensorFlow: test_tf_v1_tensorflow.py."""

from __future__ import annotations

import base64
import importlib.util
import logging
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import CheckpointError
from plait.variables import tf_v1
from plait.variables.tf_v1 import is_v1, list_v1, read_v1

SPEC = importlib.util.spec_from_file_location("v1_writer", Path(__file__).with_name("v1_writer.py"))
writer = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(writer)
base = writer.base

TENSORFLOWS = (
    "eNqF1QlMFGcUB/B5w+EypXZdFCkxjSGmaUhTiYlpatPYtWlM0zRtbRrTNo1ZLGLNBoxQbRpTh+W+7/u+QURARARcAREREZH7vu/7vtmlswv/LTFN"
    "OrNv8tuZ971875vMDMMoiSsmzoQzuCSX2TpI9CWsiDXjLFiOEU6+ZSu3t5bJLzg42lyVMGZGFgx3kDOUy6xt5Ejdp0214sR2No7HL9rbXT9+w+Z3"
    "28uODhKxcJ00ObuhZ0YWIiF3ZzflRJoRl2XyS7uVTLSVLDmDG/bXfnOQGEn0RArteDMDYRwrlgrBWnCcvki6Y019xtiE0c6cISL+luQAGhFqmev/"
    "zBJD+w/v6YIhRnLojb7M9c+xDUZkbLrT2G6lfxvVlDI8Q7IzZE1Hzr3Zp5Cuz9/a2SXf/cc66Ho2P2FpxWg3/rRw+Fz4CcELkSBEmRB9QjBShhEL"
    "cVQIK6kB965miXbndHjPomlmte+KAX+T5/VofwCnXTUhj+XLpLxC4sthIXVrZ75udGrFiFGptnc22tiEVtehpVVofhmaWYQm56GxWWh4GhqYhHrH"
    "oa5RqH0YahmEGvuh171QbTf0ohOqaoeetkLlzdDjRqikHnpYBxXUQvdqoJxq6E4VlFkJpVVAyeVQQikUq4SiSqDwIiikEAosgPzyIe88yCMHcs2G"
    "FFnQdga0lQatp0ArSdBiAjQXB03HQBNR0GgENBQG9YdAPUFQZwDU5gc1+0ANXlCdB/TSDap2gZ4poAoeKlOrd6Xcgoo3oMI16P4KlLcE3V2Asuag"
    "jBkodQpKmoDix6CYEShyCAobgIL7oIAeyLcL8uqA3NsglxbIqQlS10ObddBaLbRcAy1UQ7NV0FQlNF4BjZRDg6VQnxLqLoE6iqDWQqipAKrPh17l"
    "QTU50PNsqDILepIJlaZDj1KhomToQSKUHw/lxkLZ0dDtSCg9HEoJhRKDobhAKNofivCFQr2hIE/I3x3ycYU8nSE3J8h5m3gVqTaIM1SzZVLtm3GT"
    "xZtxz7fEfJg9NcAyrqyXvr9hiCiSizNO3p8hzpbcO1ho+sis3PzZkZr3Xh9ttug41vv+0AfjljMfLn60ZqU6oTjp/rHPJ4Gfhn0WfTpBmvrF7S9z"
    "zt7/qujrx99UfPv8+9ofGn5sPd/1U/8vI79OXpiTLV/csNm2dbniKfezC74acS3WMel6+p93/sq7+eDvEp7KFFTpQi/chOeLmryo3Yd6/GgwgMaC"
    "aDqEFsJoNYK2osgpltziyTuRApIpNJWi0ik+k1KyKDOb7uZQfh49zCdlAT0ppKoiellC9UpqKaXOcuqroOFKmqii2WpaqqH1WlLXkXMDeTSRbwsF"
    "tVF4B8V0UWIPpfVR1gDlDlHBCBWPUekEPZ2i6hl6NUeNC9S2RN0rNLBGoxs0tUXzalrhdY+AAuJ1t8ZVd7s0Xz/twfJt32Hdn7KFxFyG9IhZF+vO"
    "zR9SnVSLRd4H3mH+dzu/yXsf++Ns5z8hS2i+"
)
"""Of TensorFlow 2.21, deflated: `words` lies in two slices of 65 rows, `labels` is text."""

TENSORS = {
    "a/weights": torch.arange(6.0).reshape(2, 3),
    "a/biases": torch.tensor([1.5]),
    "a/weights/Momentum": torch.full((2, 3), 0.25),
    "cut": torch.arange(-5, 5, dtype=torch.int32).reshape(5, 2),
    "flags": torch.tensor([True, False, True]),
    "global_step": torch.tensor(77),
    "half": torch.tensor([0.5, -2], dtype=torch.float16),
    "none": torch.empty(0, 4),
}


@pytest.fixture(params=[False, True], ids=["plain", "snappy"])
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return writer.write_v1(tmp_path / "net.ckpt", TENSORS, {"cut": 2}, compress=request.param)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in wanted.items()
    )


def test_what_tensorflow_wrote_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "m.ckpt"
    path.write_bytes(zlib.decompress(base64.b64decode(TENSORFLOWS)))
    wanted = {
        "flags": torch.tensor([True, False]),
        "global_step": torch.tensor(1234),
        "net/conv/weights": torch.arange(12.0).reshape(1, 2, 2, 3),
        "net/half": torch.tensor([1.5, -2.0], dtype=torch.float16),
        "words": torch.cat([torch.arange(130) * -259, torch.arange(130) * 261]).to(torch.int16).reshape(130, 2),
    }
    with caplog.at_level(logging.INFO, "plait"):
        assert same(read_v1(path), wanted)
    assert "'labels' (string)" in caplog.text
    listed = {name: (info.dtype, info.shape, info.nbytes) for name, info in list_v1(path).items()}
    assert listed["words"] == ("int16", (130, 2), 520)
    assert listed["labels"] == ("string", (2,), 0)
    assert set(listed) == {*wanted, "labels"}


def test_every_type_comes_back(tmp_path: Path):
    numbers = torch.tensor([[0, 1, -2], [3, 100, 127]])
    tensors = {f"x/{dtype}": numbers.to(dtype) for dtype in writer.FIELDS}
    limits = {f"limits/{t}": torch.tensor([torch.iinfo(t).min, torch.iinfo(t).max], dtype=t) for t in INTEGERS}
    assert same(read_v1(writer.write_v1(tmp_path / "m", tensors | limits)), tensors | limits)


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", list(writer.FIELDS), ids=str)
def test_numbers_as_plain_bytes(tmp_path: Path, dtype: torch.dtype):
    tensor = torch.tensor([[1, 0], [100, 7]]).to(dtype)
    entry = writer.listed("x", (2, 2), base.CODES[dtype], [[(0, -1), (0, -1)]])
    data = base.raw(tensor)
    proto = base.field(4, data[:3]) + base.field(4, data[3:])  # a reader has to take lists in pieces too
    assert same(read_v1(write(tmp_path, entry, proto, rank=2)), {"x": tensor})


def write(folder: Path, entry: bytes, proto: bytes, rank: int = 1, **other: bytes) -> Path:
    """A file of one tensor `x`, whole."""
    extents = [(0, -1)] * rank
    rows = {b"": writer.meta([entry]), base.slice_key("x", extents): writer.saved("x", extents, proto)}
    (folder / "m").write_bytes(writer.table(rows | {key.encode(): value for key, value in other.items()}))
    return folder / "m"


SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(shapes=st.dictionaries(NAMES, SHAPES, min_size=1, max_size=12), data=st.data())
def test_any_names_shapes_files_and_slices(tmp_path_factory, shapes, data):
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    cut = [name for name, shape in shapes.items() if shape and shape[0]]
    parts = {name: data.draw(st.integers(1, 4)) for name in cut if data.draw(st.booleans())}
    files, compress = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    path = tmp_path_factory.mktemp("v1") / "m"
    assert same(read_v1(writer.write_v1(path, tensors, parts, files=files, compress=compress)), tensors)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_packed_numbers(numbers: list[int]):
    packed = b"".join(map(base.varint, numbers))
    assert tf_v1._unpack(packed, len(numbers)).tolist() == numbers
    for bad in (packed + b"\x80", packed + b"\1", b"\xff" * 11 + packed):
        with pytest.raises(CheckpointError):
            tf_v1._unpack(bad, len(numbers))


def test_where_one_is_found(tmp_path: Path, file: Path):
    assert is_v1(file)
    assert is_v1(tmp_path)
    assert same(read_v1(str(tmp_path)), TENSORS)
    for other in ("other", "net", "net.ckpt.index", "net.ckpt-00000-of-00001", "zero\0byte", "other/net.ckpt"):
        assert not is_v1(tmp_path / other)
    (tmp_path / "net.ckpt.meta").write_bytes(b"a graph")
    assert is_v1(tmp_path)
    writer.write_v1(tmp_path / "other.ckpt-7", {"a": torch.ones(1)})
    assert not is_v1(tmp_path)
    with pytest.raises(CheckpointError, match=r"no TensorFlow checkpoint of the older kind \(V1\); write the path"):
        read_v1(tmp_path)


def test_the_newer_kind_comes_first(tmp_path: Path, file: Path):
    base.write_bundle(file, {"a": torch.ones(1)})
    for path in (tmp_path, file, f"{file}.index", f"{file}.data-00000-of-00001"):
        assert not is_v1(path)


@pytest.mark.parametrize("named", ["net.ckpt", "/somewhere/else/net.ckpt"])
def test_the_newest_is_what_the_file_checkpoint_says(tmp_path: Path, file: Path, named: str):
    writer.write_v1(tmp_path / "other.ckpt", {"a": torch.ones(1)})
    (tmp_path / "checkpoint").write_text(f'model_checkpoint_path: "{named}"')
    assert same(read_v1(tmp_path), TENSORS)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "gone"')
    assert not is_v1(tmp_path)


@pytest.mark.parametrize("compress", [False, True])
def test_several_files_are_put_together(tmp_path: Path, compress: bool):
    prefix = writer.write_v1(tmp_path / "model.ckpt-9", TENSORS, {"cut": 3}, files=2, compress=compress)
    first = Path(f"{prefix}-00000-of-00002")
    (tmp_path / "model.ckpt-9-notes-of-it").write_text("no table")
    assert "cut" in list_v1(prefix)
    for path in (prefix, first, f"{prefix}-00001-of-00002", f"{prefix}-?????-of-00002", tmp_path):
        assert is_v1(path)
        assert same(read_v1(path), TENSORS)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-9-?????-of-00002"')
    assert same(read_v1(tmp_path), TENSORS)
    first.unlink()
    for path in (prefix, tmp_path, f"{prefix}-?????-of-00002"):
        with pytest.raises(CheckpointError, match="ckpt-9-00000-of-00002 cannot be read: .*No such file"):
            read_v1(path)


def test_files_that_do_not_belong_together(tmp_path: Path):
    for number, value in enumerate((torch.ones(2), torch.ones(3))):
        writer.write_v1(tmp_path / f"m-0000{number}-of-00002", {"x": value})
    with pytest.raises(CheckpointError, match=r"m-00001-of-00002: 'x' is float32 \(3,\) here, float32 \(2,\) before"):
        read_v1(tmp_path / "m")
    writer.write_v1(tmp_path / "m-00001-of-00002", {"x": torch.ones(2)})
    with pytest.raises(CheckpointError, match="slices of 'x' have more or fewer numbers"):
        read_v1(tmp_path / "m")
    writer.write_v1(tmp_path / "m", {"y": torch.ones(2)}, files=3)
    assert not is_v1(tmp_path / "m")  # of two or of three


def test_only_the_names_asked_for(file: Path):
    assert same(read_v1(file, ["cut", "a/biases"]), {name: TENSORS[name] for name in ("cut", "a/biases")})
    assert read_v1(file, []) == {}
    with pytest.raises(CheckpointError, match=r"net.ckpt has no variable 'b'; it has 'a/weights'"):
        read_v1(file, ["b"])


def test_other_types_are_passed_over_and_refused_by_name(tmp_path: Path):
    path = write(tmp_path, writer.listed("x", (2,), 7, [[(0, -1)]]), base.field(8, b"text"))
    assert read_v1(path) == {}
    with pytest.raises(CheckpointError, match="has 'x' as string, which cannot be read"):
        read_v1(path, ["x"])


FLOATS, INTS, WHOLE = base.field(5, bytes(8)), base.field(7, b"\1\2"), [[(0, -1)]]
BAD: dict[str, tuple[bytes, bytes, str]] = {
    "too few bytes": (writer.listed("x", (3,), 1, WHOLE), FLOATS, "'x': has 8 bytes of numbers, 12 are needed"),
    "too many bytes": (writer.listed("x", (1,), 1, WHOLE), FLOATS, "'x': has 8 bytes of numbers, 4 are needed"),
    "one for all": (writer.listed("x", (9,), 1, WHOLE), base.field(5, bytes(4)), "has 4 bytes of numbers"),
    "too few numbers": (writer.listed("x", (3,), 3, WHOLE), INTS, "'x': has 2 numbers, 3 are needed"),
    "in another list": (writer.listed("x", (2,), 9, WHOLE), INTS, "'x': has 0 numbers, 2 are needed"),
    "a cut number": (writer.listed("x", (2,), 3, WHOLE), base.field(7, b"\1\2\x80"), "has 2 numbers, 2 are needed"),
    "a long number": (writer.listed("x", (1,), 9, WHOLE), base.field(10, b"\x80" * 10 + b"\1"), "does not end"),
    "a large number": (writer.listed("x", (1,), 4, WHOLE), base.field(7, base.varint(256)), "are no uint8"),
    "a negative number": (writer.listed("x", (1,), 19, WHOLE), base.field(13, base.varint(-1)), "are no uint16"),
    "plain bytes": (writer.listed("x", (2,), 3, WHOLE), base.field(4, bytes(7)), "has 7 bytes of numbers, 8"),
    "no numbers": (writer.listed("x", (2,), 1, WHOLE), b"", "has 0 bytes of numbers"),
    "negative": (writer.listed("x", (-1,), 1, WHOLE), FLOATS, r"'x' has the shape \(-1,\), which no tensor has"),
    "huge": (writer.listed("x", (2**40, 2**40), 1, WHOLE), FLOATS, "which no tensor has"),
    "rank": (writer.listed("x", [1] * 99, 1, WHOLE), FLOATS, "which no tensor has"),
    "terabytes": (writer.listed("x", (2**40,), 1, WHOLE), FLOATS, "but tells of 4398046511104 or more"),
    "terabytes of bits": (writer.listed("x", (2**40,), 10, WHOLE), FLOATS, "but tells of 1099511627776 or more"),
    "no slices": (writer.listed("x", (2,), 1, []), FLOATS, "more or fewer numbers"),
    "a slice of another rank": (writer.listed("x", (2,), 1, [[(0, -1)] * 2]), FLOATS, "does not fit it"),
    "a slice outside": (writer.listed("x", (2,), 1, [[(1, 2)]]), FLOATS, "does not fit it"),
    "a slice that is not there": (writer.listed("x", (2,), 1, [[(0, 2)]]), FLOATS, "listed, but not there"),
    "overlap": (writer.listed("x", (4,), 1, [[(0, 2)], [(0, 2)]]), FLOATS, "overlap and leave gaps"),
    "not text": (base.field(1, b"\xff\xfe"), FLOATS, "UnicodeDecodeError"),
    "not a message": (b"\x0b", FLOATS, "wire type 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(tmp_path: Path, case: str):
    entry, proto, words = BAD[case]
    path = write(tmp_path, entry, proto)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_v1(path)
    assert str(path) in str(caught.value)


def test_a_table_that_is_no_checkpoint(tmp_path: Path):
    path = tmp_path / "m"
    good = {b"x": b""}
    for rows, words in (
        ({}, "does not tell what is in it"),
        (good, "does not tell what is in it"),
        ({b"": b"", **good}, "does not tell what is in it"),
        ({b"": writer.meta([], needs=2)}, "needs a reader of version 2"),
    ):
        path.write_bytes(writer.table(rows))
        with pytest.raises(CheckpointError, match=words):
            list_v1(path)
    path.write_bytes(writer.table({b"": writer.meta([])}))
    assert read_v1(path) == {}


def test_numbers_of_another_tensor_are_refused(tmp_path: Path):
    entry, key = writer.listed("x", (2,), 1, WHOLE), base.slice_key("x", WHOLE[0])
    for value, words in (
        (writer.saved("y", WHOLE[0], FLOATS), r"where 'x' .* should be, there is 'y'"),
        (writer.saved("x", [(0, 2)], FLOATS), r"there is 'x' \[\(\(0, 2\),\)\]"),
        (b"", "there is ''"),
    ):
        (tmp_path / "m").write_bytes(writer.table({b"": writer.meta([entry]), key: value}))
        with pytest.raises(CheckpointError, match=words):
            read_v1(tmp_path / "m")


def try_all(file: Path, contents: Callable[[], bytes], turns: int) -> tuple[int, int]:
    """How many were refused, how many were read as they had been."""
    refused = equal = 0
    for _ in range(turns):
        file.write_bytes(contents())
        try:
            equal += same(read_v1(file), TENSORS)
        except CheckpointError:
            refused += 1
    return refused, equal


def test_a_damaged_file_is_refused_or_read_as_it_was(file: Path):
    """Some bytes mean nothing, such as the padding of the footer; none may change what is read."""
    draw, good = random.Random(7), file.read_bytes()

    def damaged() -> bytes:
        bad = bytearray(good)
        if draw.random() < 0.2:
            del bad[draw.randrange(len(bad)) :]
        else:
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        return bytes(bad)

    assert try_all(file, lambda: good, 1) == (0, 1)
    refused, equal = try_all(file, damaged, 600)
    assert refused + equal == 600
    assert refused > 450


@pytest.mark.parametrize("compress", [False, True])
def test_nonsense_with_the_right_checksums_is_refused_or_read(tmp_path: Path, compress: bool):
    """Whoever alters a file can mend its checksums too: the parser has to stand by itself."""
    draw = random.Random(8)
    block = base.block(sorted(writer.rows_of(TENSORS, {"cut": 2})[0].items()), 4)
    good = writer.snap(block) if compress else block

    def forged() -> bytes:
        bad = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            bad[draw.randrange(len(bad))] = draw.choice([0, 127, 128, 255, draw.randrange(256)])
        return base.assemble([(b"\xff", bytes(bad))], int(compress))

    assert try_all(tmp_path / "m", lambda: base.assemble([(b"\xff", good)], int(compress)), 1) == (0, 1)
    assert try_all(tmp_path / "m", forged, 600)[0] > 300
