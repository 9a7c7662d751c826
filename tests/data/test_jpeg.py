"""The upper rows of a JPEG are those of the whole, to the bit; what is odd is left to the whole way."""

from __future__ import annotations

import io

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from plait.data.jpeg import Frame, decode_upper
from plait.data.pictures import decode
from plait.errors import ConfigError, DataError

SAMPLINGS = ["444", "422", "420", "440", "411"]


def noise(height, width, channels=3, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 3 + 2, width // 3 + 2, channels), dtype=np.uint8)
    return np.ascontiguousarray(np.repeat(np.repeat(coarse, 3, 0), 3, 1)[:height, :width])


def made(height=120, width=90, sampling="420", channels=3):
    space = "RGB" if channels == 3 else "GRAY"
    image = noise(height, width, channels)
    return simplejpeg.encode_jpeg(image, 85, space, "Gray" if channels == 1 else sampling)


def by_pillow(**options):
    stream = io.BytesIO()
    Image.fromarray(noise(120, 90)).save(stream, "JPEG", quality=85, **options)
    return stream.getvalue()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(120, 90), (127, 61), (49, 17)])
@pytest.mark.parametrize("sampling", [*SAMPLINGS, "Gray"])
def test_the_very_pixels_of_the_whole(sampling, size, channels):
    data = made(*size, sampling, channels=1 if sampling == "Gray" else 3)
    whole = decode(data, "x", channels=channels)
    early = 0
    for rows in range(1, size[0] + 1):
        upper = decode(data, "x", channels=channels, rows=rows)
        assert np.array_equal(upper, whole[:rows]), rows
        early += decode_upper(data, rows) is not None
    assert early >= size[0] - 32 - 1  # all but the last ones are decoded without the rest


@pytest.mark.parametrize("options", [{"restart_marker_blocks": 2}, {"restart_marker_rows": 1}, {"optimize": True}])
def test_restarts_and_tables_of_its_own(options):
    data = by_pillow(**options)
    for rows in (1, 40, 64, 90):
        assert decode_upper(data, rows) is not None
        assert np.array_equal(decode(data, "x", rows=rows), decode(data, "x")[:rows])


def test_notes_and_thumbnails_in_front():
    thumbnail = made(16, 16)
    exif = Image.Exif()
    exif[0x010E] = "a note"
    data = by_pillow(exif=exif.tobytes() + thumbnail, icc_profile=b"p" * 100_000, comment=b"a comment")
    assert Frame.of(data)[:3] == (120, 90, 16)
    assert np.array_equal(decode(data, "x", rows=30), decode(data, "x")[:30])
    assert decode_upper(data, 30) is not None


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_bytes_of_any_kind_which_stay_as_they_are(wrap):
    data = made()
    given = wrap(bytearray(data)) if wrap is memoryview else wrap(data)
    assert np.array_equal(decode(given, "x", rows=20), decode(data, "x")[:20])
    assert bytes(given) == data


def test_what_is_lost_shows_at_the_end_of_the_file():
    data = made(256, 256)
    lost = data[: len(data) // 4] + data[len(data) // 2 :]
    with pytest.raises(DataError, match="premature end of data segment"):
        decode(lost, "x")
    assert decode(lost, "x", rows=128).shape == (128, 256, 3)  # which is why the first pass over files decodes all


def test_gray_is_the_same_however_it_was_decoded():
    """Of files with stray bytes at the end Pillow makes it."""
    data = made()
    stray = data[:-2] + b"\0\0\0\0" + data[-2:]
    assert np.array_equal(decode(stray, "x", channels=1, rows=30), decode(stray, "x", channels=1)[:30])


def test_the_rest_is_not_decoded():
    data = bytearray(made())
    place = len(data) * 3 // 4
    data[place : place + 40] = b"\xff\xd1" * 20  # no JPEG has this here
    with pytest.raises(DataError, match="cannot be decoded"):
        decode(data, "x")
    assert np.array_equal(decode(data, "x", rows=20), decode(made(), "x", rows=20))


def test_damage_in_the_upper_rows_is_an_error():
    data = bytearray(made())
    place = len(data) // 2
    data[place : place + 40] = b"\xff\xd1" * 20
    with pytest.raises(DataError, match=r"cats/7\.jpg begins like a JPEG but cannot be decoded"):
        decode(data, "cats/7.jpg", rows=100)


def test_a_file_that_is_cut_off_is_an_error_wherever():
    data = made()
    for end in (-1, -2, -3, len(data) // 2):
        with pytest.raises(DataError, match="cannot be decoded"):
            decode(data[:end], "x", rows=8)


def changed(data, at, value):
    broken = bytearray(data)
    broken[at] = value
    return bytes(broken)


def frame_at(data):
    return data.index(b"\xff\xc0")


def test_what_is_odd_is_left_alone():
    data = made()
    frame, scan = frame_at(data), data.index(b"\xff\xda")
    odd = {
        "progressive": by_pillow(progressive=True),
        "of four inks": _cmyk(),
        "followed by something": data + b"and more\n",
        "of 12 bits": changed(data, frame + 4, 12),
        "of no height": changed(changed(data, frame + 5, 0), frame + 6, 0),
        "of several scans": changed(data, scan + 4, 1),
        "of two frames": data[:frame] + data[frame:scan] + data[frame:],
        "with arithmetic": changed(data, frame + 1, 0xC9),
        "with bytes between": data[:frame] + b"\0" + data[frame:],
        "with filling": data[:frame] + b"\xff" + data[frame:],
        "of many notes": data[:2] + b"\xff\xfe\0\2" * 101 + data[2:],
        "without rows": changed(made(channels=1), frame_at(made(channels=1)) + 11, 0x10),
        "nothing but an end": b"\xff\xd8\xff\xd9",
        "empty": b"",
        "another kind": b"\x89PNG\r\n\x1a\n\xff\xd9",
        "a BMP with the bytes of one": b"BM" + data[2:],
    }
    for name, file in odd.items():
        assert Frame.of(file) is None, name
    assert Frame.of(data) is not None


def _cmyk():
    stream = io.BytesIO()
    Image.fromarray(noise(120, 90)).convert("CMYK").save(stream, "JPEG")
    return stream.getvalue()


def test_odd_files_have_their_upper_rows_too():
    data = made()
    for file in (
        by_pillow(progressive=True),
        _cmyk(),
        data + b"and more\n",
        data[:2] + b"\xff\xfe\0\2" * 101 + data[2:],
    ):
        assert np.array_equal(decode(file, "x", rows=50), decode(file, "x")[:50])


def test_less_than_no_rows():
    with pytest.raises(ConfigError, match="rows is -1; write how many"):
        decode(made(), "x", rows=-1)


def test_all_rows_or_more_are_the_whole():
    data = made()
    for rows in (119, 120, 500):
        assert decode_upper(data, rows) is None
        assert np.array_equal(decode(data, "x", rows=rows), decode(data, "x")[:rows])
    assert decode(data, "x", rows=0).shape == (0, 90, 3)


def test_what_goes_wrong_otherwise_is_left_to_the_whole_way(monkeypatch):
    def refuses(*args, **options):
        raise ValueError("Unsupported marker type 0x99")

    data = made()
    monkeypatch.setattr(simplejpeg, "decode_jpeg", refuses)
    assert decode_upper(data, 20) is None


def test_the_size_is_checked_before_memory_is_taken():
    data = made()
    place = frame_at(data) + 5
    bomb = data[:place] + (16000).to_bytes(2, "big") + (15000).to_bytes(2, "big") + data[place + 4 :]
    with pytest.raises(DataError, match=r"bomb is a JPEG of 16000 x 15000 = 240000000 pixels by its header"):
        decode(bomb, "bomb", rows=10)


def test_damaged_files_have_the_same_upper_rows_or_are_errors():
    rng = np.random.default_rng(3)
    files = [made(sampling=sampling) for sampling in SAMPLINGS] + [by_pillow(restart_marker_rows=1)]
    early = both = 0
    for number in range(600):
        data = bytearray(files[number % len(files)])
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(2, len(data) - 2))] ^= 1 << int(rng.integers(0, 8))
        rows = int(rng.integers(1, 120))
        try:
            upper = decode(data, "x", rows=rows, max_pixels=300_000)
        except DataError:
            with pytest.raises(DataError):  # the whole is one then as well
                decode(data, "x", max_pixels=300_000)
            continue
        early += 1
        try:
            whole = decode(data, "x", max_pixels=300_000)
        except DataError:
            continue
        both += 1
        assert np.array_equal(upper, whole[:rows]), number
    assert early > both > 100
