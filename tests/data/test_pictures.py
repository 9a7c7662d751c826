import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from plait.data.pictures import MAX_PIXELS, decode, encode_jpeg, encode_png, opencv, resize, size_of
from plait.errors import ConfigError, DataError


def smooth(height=40, width=60, channels=3):
    """A picture that survives a JPEG well."""
    rows, columns = np.mgrid[:height, :width]
    waves = [128 + 100 * np.sin(rows / 9 + shift) * np.cos(columns / 11 + 2 * shift) for shift in range(channels)]
    return np.stack(waves, axis=2).astype(np.uint8)


def file_of(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def off(left, right):
    return int(np.abs(left.astype(int) - right.astype(int)).max())


RGB = smooth()
PILLOW = Image.fromarray(RGB)
JPEG = encode_jpeg(RGB)
PNG = encode_png(RGB)


@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("TIFF", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("WEBP", {"quality": 95}, 20),
        ("JPEG", {"quality": 95}, 12),
        ("JPEG", {"quality": 95, "progressive": True}, 12),
    ],
)
def test_every_kind_gives_its_pixels(kind, options, most):
    data = file_of(PILLOW, kind, **options)
    pixels = decode(data, "a picture")
    assert (pixels.shape, pixels.dtype) == ((40, 60, 3), np.uint8)
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    assert off(pixels, RGB) <= most
    assert size_of(data, "a picture") == (40, 60)
    gray = decode(data, "a picture", channels=1)
    assert gray.shape == (40, 60, 1)
    assert off(gray[:, :, 0], np.asarray(PILLOW.convert("L"))) <= max(most, 1)


def test_a_jpeg_has_the_very_pixels_that_others_decode():
    assert off(decode(JPEG, "x"), np.asarray(Image.open(io.BytesIO(JPEG)))) == 0


@pytest.mark.parametrize("data", [JPEG, PNG], ids=["JPEG", "PNG"])
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_bytes_of_any_kind(data, wrap):
    assert off(decode(wrap(data), "x"), decode(data, "x")) == 0
    assert size_of(wrap(data), "x") == (40, 60)


def test_a_file_knows_its_kind_better_than_its_name():
    assert off(decode(PNG, "picture.jpg"), RGB) == 0


def test_of_many_pictures_the_first():
    frames = [Image.fromarray(np.full((6, 8), shade, np.uint8)) for shade in (10, 200)]
    for kind in ("GIF", "TIFF", "PNG"):
        assert decode(file_of(frames[0], kind, save_all=True, append_images=frames[1:]), "x").max() == 10


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_of_16_bits_the_upper_8(kind, channels):
    values = np.array([[0x0000, 0x00FF, 0x0100], [0x7FFF, 0x8000, 0xFFFF]], np.uint16)
    pixels = decode(file_of(Image.fromarray(values), kind), "x", channels=channels)
    assert pixels.shape == (2, 3, channels)
    for channel in range(channels):
        assert pixels[:, :, channel].tolist() == [[0, 0, 1], [127, 128, 255]]


def test_16_bits_in_colour():
    values = np.array([[[0x00FF, 0x8000, 0xFFFF]]], np.uint16)
    data = opencv().imencode(".png", values[:, :, ::-1])[1].tobytes()
    assert decode(data, "x").tolist() == [[[0, 128, 255]]]


def test_transparency_is_dropped():
    clear = np.dstack([RGB, np.zeros((40, 60), np.uint8)])
    assert off(decode(file_of(Image.fromarray(clear), "PNG"), "x"), RGB) == 0
    palette = PILLOW.convert("P")
    data = file_of(palette, "PNG", transparency=bytes(range(256)))
    assert off(decode(data, "x"), np.asarray(palette.convert("RGB"))) == 0


def test_a_cameras_orientation_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by a quarter
    for kind in ("JPEG", "PNG"):
        data = file_of(PILLOW, kind, exif=exif)
        assert decode(data, "x").shape == (40, 60, 3)
        assert size_of(data, "x") == (40, 60)


def test_the_four_inks_of_print():
    data = file_of(PILLOW.convert("CMYK"), "JPEG", quality=95)
    assert off(decode(data, "x"), RGB) <= 12
    ycck = bytearray(data)
    ycck[data.index(b"Adobe") + 11] = 2  # other colours, but of a picture still
    for file in (data, bytes(ycck)):
        pillow = Image.open(io.BytesIO(file))
        assert off(decode(file, "x"), np.asarray(pillow.convert("RGB"))) <= 2
        assert off(decode(file, "x", channels=1)[:, :, 0], np.asarray(pillow.convert("L"))) <= 2


def test_harmless_oddities_of_jpegs_are_forgiven():
    stray = JPEG[:-2] + b"\x12\x34\x56" + JPEG[-2:]
    version = bytearray(JPEG)
    version[JPEG.index(b"JFIF\0") + 5] = 0
    for data in (stray, bytes(version), JPEG + b"trailing bytes"):
        assert off(decode(data, "x"), decode(JPEG, "x")) == 0
        assert size_of(data, "x") == (40, 60)


def test_damaged_pictures_are_errors_that_name_the_file():
    progressive = file_of(PILLOW, "JPEG", progressive=True)
    cut = [JPEG[: len(JPEG) // 2], JPEG[: len(JPEG) // 2] + b"\xff\xd9", progressive[:-200], JPEG[:-2], JPEG[:30]]
    for data in cut:
        with pytest.raises(DataError, match=r"cats/7\.jpg begins like a JPEG but cannot be decoded \(.+\)"):
            decode(data, "cats/7.jpg")
    for kind in ("PNG", "GIF", "BMP", "WebP", "TIFF"):
        whole = file_of(PILLOW, kind.upper())
        with pytest.raises(DataError, match=rf"cats/7 begins like a {kind}"):
            decode(whole[: len(whole) // 2], "cats/7")


def test_what_is_no_picture():
    with pytest.raises(DataError, match="page is no picture of a known kind, it begins with b'<html>"):
        decode(b"<html><body>404", "page")
    with pytest.raises(DataError, match="nothing is empty"):
        size_of(b"", "nothing")
    with pytest.raises(DataError, match="sound is no picture"):
        decode(b"RIFF\x24\0\0\0WAVEfmt ", "sound")
    with pytest.raises(DataError, match="odd is a WebP without a header"):
        size_of(b"RIFF\x24\0\0\0WEBPodd!", "odd")
    with pytest.raises(DataError, match="deep is a TIFF with samples of 32 bits"):
        decode(file_of(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF"), "deep")
    with pytest.raises(ConfigError, match="channels is 4"):
        decode(PNG, "x", channels=4)


def forged_png(height, width):
    header = b"IHDR" + struct.pack(">II", width, height) + PNG[24:29]
    return PNG[:12] + header + struct.pack(">I", zlib.crc32(header)) + PNG[33:]


def forged_jpeg(height, width):
    data, place = bytearray(JPEG), JPEG.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def forged_webp(height, width):
    data = bytearray(file_of(PILLOW.convert("RGBA"), "WEBP", icc_profile=b"some profile"))
    assert data[12:16] == b"VP8X"
    data[24:30] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return bytes(data)


def forged_bmp(height, width):
    data = bytearray(file_of(PILLOW, "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def forged_gif(height, width):
    data = bytearray(file_of(PILLOW, "GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


@pytest.mark.parametrize("forged", [forged_bmp, forged_gif, forged_jpeg, forged_png, forged_webp])
def test_the_size_is_checked_before_memory_is_taken(forged):
    with pytest.raises(DataError, match=r"bomb is a \w+ of 16000 x 15000 = 240000000 pixels by its header"):
        decode(forged(16000, 15000), "bomb")
    assert size_of(forged(16000, 15000), "bomb") == (16000, 15000)
    assert size_of(forged(40, 60), "x") == (40, 60)


def test_the_limit_on_pixels():
    for data in (JPEG, PNG, file_of(PILLOW, "WEBP"), file_of(PILLOW, "WEBP", lossless=True)):
        assert decode(data, "x", max_pixels=2400).shape == (40, 60, 3)
        with pytest.raises(DataError, match="2400 pixels by its header, 2399 are allowed"):
            decode(data, "x", max_pixels=2399)
    assert MAX_PIXELS * 3 <= 256 << 20


def test_bilinear_has_half_pixel_centres_and_no_smoothing():
    ramp = np.arange(16, dtype=np.float32).reshape(4, 4, 1)
    assert resize(ramp, 2, 2)[:, :, 0].tolist() == [[2.5, 4.5], [10.5, 12.5]]
    assert resize(ramp, 1, 4)[:, :, 0].tolist() == [[6, 7, 8, 9]]
    assert resize(np.array([[[0.0], [8.0]]], np.float32), 1, 4)[0, :, 0].tolist() == [0, 2, 6, 8]


def test_nearest_is_tensorflows():
    ramp = np.arange(16, dtype=np.uint8).reshape(4, 4, 1)
    assert resize(ramp, 2, 2, "nearest")[:, :, 0].tolist() == [[0, 2], [8, 10]]
    assert resize(ramp, 1, 8, "nearest")[:, :, 0].tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]
    assert resize(ramp, 3, 3, "nearest")[:, :, 0].tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    row = np.arange(500, dtype=np.float32).reshape(1, 500, 1)
    scale = np.float32(500) / np.float32(224)
    assert resize(row, 1, 224, "nearest")[0, :, 0].tolist() == [int(np.float32(i) * scale) for i in range(224)]


@pytest.mark.parametrize("method", ["bilinear", "nearest"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("channels", [1, 3])
def test_resizing_keeps_the_kind(method, dtype, channels):
    for size in ((40, 60), (7, 90)):
        scaled = resize(smooth(channels=channels).astype(dtype), *size, method)
        assert (scaled.shape, scaled.dtype) == ((*size, channels), dtype)
        assert scaled.flags.c_contiguous


def test_wrong_resizing_is_an_error():
    with pytest.raises(ConfigError, match="scaled to 0 x 5"):
        resize(RGB, 0, 5)
    with pytest.raises(ConfigError, match="method is 'cubic'; write 'bilinear' or 'nearest'"):
        resize(RGB, 5, 5, "cubic")


@pytest.mark.parametrize("channels", [1, 3])
def test_encoding(channels):
    image = smooth(channels=channels)
    assert off(decode(encode_png(image), "x", channels=channels), image) == 0
    assert off(decode(encode_jpeg(image), "x", channels=channels), image) <= 12
    assert len(encode_jpeg(image, quality=30)) < len(encode_jpeg(image))
    assert off(decode(encode_jpeg(image[:, ::-1]), "x", channels=channels), image[:, ::-1]) <= 12
    for wrong in (image.astype(np.float32), image[:, :, 0], np.zeros((4, 4, 4), np.uint8), image[:0]):
        with pytest.raises(DataError, match="a picture to encode is"):
            encode_png(wrong)
        with pytest.raises(DataError, match="a picture to encode is"):
            encode_jpeg(wrong)


def test_opencv_has_no_threads_of_its_own():
    assert opencv() is opencv()
    assert opencv().getNumThreads() == 1


def test_tiles_larger_than_the_picture_count_for_the_limit():
    """A TIFF of 16x16 whose one tile is said to have 16000x16000 pixels."""
    entries = [(256, 16), (257, 16), (258, 8), (259, 1), (262, 1), (277, 1), (322, 16000), (323, 16000), (324, 200)]
    entries.append((325, 16))
    directory = struct.pack("<H", len(entries))
    directory += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries) + bytes(4)
    data = b"II*\0" + struct.pack("<I", 8) + directory
    with pytest.raises(DataError, match=r"a\.tif.*(tiles of 16000 x 16000|TIFF)"):
        decode(data.ljust(400, b"\0"), "a.tif")
