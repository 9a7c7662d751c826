"""Broken pictures decode to the size of their header or are errors that name the file; nothing else happens."""

import io
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plait.data.pictures import decode, encode_jpeg, size_of
from plait.errors import DataError

MAX_PIXELS = 300_000
MAX_SECONDS = 2.0
MAX_GROWTH_KB = 48 << 10
"""Libraries, their tables, and a few copies of the largest picture."""


def file_of(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def whole_files():
    rng = np.random.default_rng(7)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    image = coarse.resize((64, 48), Image.Resampling.BICUBIC)
    jpegs = [
        encode_jpeg(np.asarray(image), 85),
        encode_jpeg(np.asarray(image.convert("L"))[:, :, np.newaxis], 85),
        file_of(image, "JPEG", progressive=True),
        file_of(image, "JPEG", restart_marker_blocks=3),
        file_of(image.convert("CMYK"), "JPEG"),
        file_of(image, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"),
    ]
    pngs = [
        file_of(image, "PNG"),
        file_of(image.convert("P"), "PNG", transparency=bytes(200)),
        file_of(image.convert("LA"), "PNG"),
        file_of(Image.fromarray(rng.integers(0, 65536, (48, 64), dtype=np.uint16)), "PNG"),
    ]
    others = [
        file_of(image, "GIF"),
        file_of(image, "BMP"),
        file_of(image, "WEBP"),
        file_of(image, "WEBP", lossless=True),
        file_of(image, "TIFF"),
    ]
    return jpegs, pngs, others


def compressed_tiffs():
    image = Image.fromarray(np.random.default_rng(7).integers(0, 256, (48, 64, 3), dtype=np.uint8))
    return [file_of(image, "TIFF", compression=f"tiff_{method}") for method in ("lzw", "adobe_deflate", "jpeg")]


def flipped(data, rng, end):
    broken = bytearray(data)
    for _ in range(int(rng.integers(1, 6))):
        broken[int(rng.integers(0, min(end, len(data))))] ^= 1 << int(rng.integers(0, 8))
    return bytes(broken)


def flipped_header(data, rng):
    return flipped(data, rng, 200)


def flipped_anywhere(data, rng):
    return flipped(data, rng, len(data))


def cut(data, rng):
    return data[: int(rng.integers(0, len(data)))]


def cut_and_ended(data, rng):
    return cut(data, rng) + data[-12:]


def lengthened(data, rng):
    return data + rng.bytes(int(rng.integers(1, 2000)))


def replaced(data, rng):
    start, count = int(rng.integers(4, len(data))), int(rng.integers(1, 300))
    return data[:start] + rng.bytes(count) + data[start + count :]


def random_bytes(data, rng):
    return data[: int(rng.integers(0, 40))] + rng.bytes(int(rng.integers(0, 3000)))


def resized(data, rng):
    """Another size in the header, and a right check sum over it."""
    height, width = (int(2 ** rng.uniform(0, 16)) for _ in range(2))
    if data.startswith(b"\x89PNG"):
        header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
        return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
    broken = bytearray(data)
    for marker in (b"\xff\xc0", b"\xff\xc2"):
        place = data.find(marker)
        if place > 0:
            broken[place + 5 : place + 9] = struct.pack(">HH", height, width)
    return bytes(broken)


def damaged_pixels(data, rng):
    """What is damaged inside a PNG gets a right check sum, so that the damage reaches the decoder."""
    place = data.find(b"IDAT")
    if place < 0:
        return flipped_anywhere(data, rng)
    length = int.from_bytes(data[place - 4 : place], "big")
    body = b"IDAT" + flipped(data[place + 4 : place + 4 + length], rng, length)
    return data[:place] + body + struct.pack(">I", zlib.crc32(body)) + data[place + 8 + length :]


WAYS = [
    flipped_header, flipped_anywhere, cut, cut_and_ended, lengthened, replaced, random_bytes, resized, damaged_pixels,
]  # fmt: skip


def broken_files(count, seed):
    jpegs, pngs, others = whole_files()
    rng = np.random.default_rng(seed)
    for number in range(count):
        group = (jpegs, pngs, jpegs, pngs, others)[number % 5]
        data = group[int(rng.integers(0, len(group)))]
        yield f"broken-{number}", WAYS[int(rng.integers(0, len(WAYS)))](data, rng), int(rng.choice([1, 3]))


def result(function, *args, **options):
    """What it returns, and the text of its error: one of them is None."""
    try:
        return function(*args, **options), None
    except DataError as error:
        return None, str(error)


def check(name, data, channels):
    """Whether it could be decoded."""
    started = time.monotonic()
    pixels, error = result(decode, data, name, channels=channels, max_pixels=MAX_PIXELS)
    size, size_error = result(size_of, data, name)
    assert time.monotonic() - started < MAX_SECONDS
    assert all(name in text for text in (error, size_error) if text is not None)
    if pixels is None:
        return False
    assert pixels.dtype == np.uint8
    assert pixels.shape == (*size, channels)
    assert pixels.shape[0] * pixels.shape[1] <= MAX_PIXELS
    return True


def peak_kb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def check_many(count, seed, capfd):
    for data in sum(whole_files(), []):
        assert check("whole", data, 3)  # and libraries are loaded
    measured = Path("/proc/self/clear_refs").exists()
    if measured:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak_kb() if measured else 0
    decoded = sum(check(*file) for file in broken_files(count, seed))
    assert 0.1 * count < decoded < 0.7 * count  # else it is not much of a test
    assert not measured or peak_kb() - before < MAX_GROWTH_KB
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


@pytest.mark.alone
@pytest.mark.filterwarnings("error")
def test_broken_pictures(capfd):
    check_many(500, 1, capfd)


@pytest.mark.alone
@pytest.mark.filterwarnings("default")  # as it is outside of tests: Pillow warns of some, and goes on
def test_broken_pictures_where_warnings_are_no_errors(recwarn, capfd):
    check_many(500, 2, capfd)


def test_broken_tiffs():
    """Apart from the others: libtiff writes to the standard error what it thinks of them."""
    rng = np.random.default_rng(4)
    for number in range(200):
        data = compressed_tiffs()[number % 3]
        check(f"broken-{number}", WAYS[number % len(WAYS)](data, rng), 3)


@pytest.mark.alone
@pytest.mark.slow
def test_many_broken_pictures(capfd):
    check_many(10_000, 3, capfd)
