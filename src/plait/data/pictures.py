"""Pictures: bytes of files to pixels and back, their size without decoding, and plain resizing.

JPEGs are decoded by simplejpeg, in its exact mode. Odd ones that it does not take and all other kinds are decoded by
Pillow: OpenCV is faster at PNGs, but writes about broken ones to the standard error of the process. (So does libtiff
about broken TIFFs, which few have.)
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import struct
import threading
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from plait.data.jpeg import decode_upper
from plait.errors import ConfigError, DataError

__all__ = ["MAX_PIXELS", "Picture", "decode", "encode_jpeg", "encode_png", "opencv", "resize", "size_of"]

MAX_PIXELS = 89_478_485
"""The largest picture that `decode` takes if nothing else is said: 256 MiB as RGB, the number that Pillow warns at."""

Picture: TypeAlias = NDArray[Any]
"""Pixels as [height, width, channels], RGB or gray."""

_SIGNATURES = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "WebP": (b"RIFF",),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
}
# Named one by one: Pillow's own search would also start programs for some kinds of files.
_READERS = {
    "JPEG": ("PIL.JpegImagePlugin", "JpegImageFile"),
    "PNG": ("PIL.PngImagePlugin", "PngImageFile"),
    "GIF": ("PIL.GifImagePlugin", "GifImageFile"),
    "BMP": ("PIL.BmpImagePlugin", "BmpImageFile"),
    "WebP": ("PIL.WebPImagePlugin", "WebPImageFile"),
    "TIFF": ("PIL.TiffImagePlugin", "TiffImageFile"),
}
_importing = threading.Lock()
_KINDS = "JPEG, PNG, GIF, BMP, WebP or TIFF"


def decode(
    data: bytes | bytearray | memoryview,
    name: str,
    *,
    channels: int = 3,
    rows: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> NDArray[np.uint8]:
    """The pixels of a picture file, [height, width, channels], of which there are 3 (RGB) or 1 (gray).

    With `rows`, only so many of the upper ones: of most JPEGs, in colour, they take less time. Not all damage is seen
    then: ask so for files that were decoded as a whole before. One that is cut off is an error still.

    Of 16-bit samples the upper 8 bits are taken. Transparency is dropped, not composited. Of many pictures in a file
    the first is taken. A camera's note (EXIF) on how to turn the picture is ignored. TensorFlow does all this alike.
    Only a TIFF's orientation, which belongs to its format, is followed.

    `name` stands in errors. A picture that is cut off, damaged, or larger than `max_pixels` is an error; the size is
    read from the header, before memory is taken. Stray bytes before a JPEG's end marker, which many cameras leave, are
    forgiven.
    """
    if channels not in (1, 3):
        raise ConfigError(f"channels is {channels!r}; write 3 for RGB or 1 for gray")
    if rows is not None and rows < 0:
        raise ConfigError(f"rows is {rows}; write how many of the upper ones are wanted, or None for all")
    kind = _kind(data, name)
    if kind == "JPEG":
        pixels = _decode_jpeg(data, name, channels, rows, max_pixels)
    else:
        pixels = _decode_with_pillow(kind, data, name, channels, max_pixels)
    return pixels[:rows]


def size_of(data: bytes | bytearray | memoryview, name: str) -> tuple[int, int]:
    """Height and width of a picture file, from its header alone."""
    kind = _kind(data, name)
    if kind == "JPEG":
        import simplejpeg  # noqa: PLC0415 - heavy

        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data, strict=False)
        except (KeyError, ValueError):
            pass  # Pillow may know it
        else:
            return height, width
    if kind == "WebP":
        return _webp_size(data, name)
    width, height = _opened(kind, data, name).size
    return height, width


def resize(image: Picture, height: int, width: int, method: str = "bilinear") -> Picture:
    """A picture scaled to `height` x `width`, without keeping its shape.

    'bilinear' takes pixels for squares with half-pixel centres and does not smooth when it shrinks: what PyTorch and
    OpenCV do. TensorFlow's first kernel, which is shifted by up to half a pixel, is not followed.
    'nearest' is TensorFlow's first NEAREST_NEIGHBOR: the source of pixel i is floor(i * scale), in float32.
    """
    if height < 1 or width < 1:
        raise ConfigError(f"a picture cannot be scaled to {height} x {width}; both have to be 1 or more")
    if method == "nearest":
        rows, columns = _nearest(image.shape[0], height), _nearest(image.shape[1], width)
        return image.take(rows, axis=0).take(columns, axis=1)
    if method != "bilinear":
        raise ConfigError(f"method is {method!r}; write 'bilinear' or 'nearest'")
    cv2 = opencv()
    scaled: Picture = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    return scaled.reshape(height, width, image.shape[2])  # OpenCV drops the axis of a single channel


def encode_jpeg(image: NDArray[np.uint8], quality: int = 95) -> bytes:
    """A JPEG file of a uint8 picture with 3 (RGB) or 1 (gray) channels; colours at half the resolution, as usual."""
    import simplejpeg  # noqa: PLC0415 - heavy

    gray = _encodable(image).shape[2] == 1
    space, sampling = ("GRAY", "Gray") if gray else ("RGB", "420")
    pixels = np.ascontiguousarray(image)
    encoded: bytes = simplejpeg.encode_jpeg(pixels, quality=quality, colorspace=space, colorsubsampling=sampling)
    return encoded


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """A PNG file of a uint8 picture with 3 (RGB) or 1 (gray) channels."""
    cv2 = opencv()
    pixels = np.ascontiguousarray(_encodable(image)[:, :, ::-1])  # OpenCV's order is BGR
    encoded: bytes = cv2.imencode(".png", pixels)[1].tobytes()
    return encoded


@functools.cache
def opencv() -> Any:
    """OpenCV, imported when it is first needed, without threads of its own: the readers around it run in parallel."""
    with _importing:  # many readers may be the first
        paths = os.environ.get("LD_LIBRARY_PATH")
        import cv2  # noqa: PLC0415 - heavy

        # its import adds itself to the search path of every program that is started from then on
        if paths is None:
            os.environ.pop("LD_LIBRARY_PATH", None)
        else:
            os.environ["LD_LIBRARY_PATH"] = paths
        cv2.setNumThreads(0)
        return cv2


def _kind(data: bytes | bytearray | memoryview, name: str) -> str:
    head = bytes(data[:12])
    for kind, signatures in _SIGNATURES.items():
        if head.startswith(signatures) and (kind != "WebP" or head[8:12] == b"WEBP"):
            return kind
    if not head:
        raise DataError(f"{name} is empty; give a file with a picture ({_KINDS})")
    raise DataError(f"{name} is no picture of a known kind, it begins with {head!r}; give {_KINDS}")


def _decode_jpeg(
    data: bytes | bytearray | memoryview, name: str, channels: int, rows: int | None, max_pixels: int
) -> NDArray[np.uint8]:
    import simplejpeg  # noqa: PLC0415 - heavy

    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data, strict=False)
        _check_size("JPEG", name, height, width, max_pixels)
        upper = decode_upper(data, rows) if rows is not None and channels == 3 else None
        if upper is not None:
            return upper
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB" if channels == 3 else "GRAY")
    except DataError:
        raise
    except (KeyError, ValueError) as error:  # a KeyError is what simplejpeg makes of half a header
        if _is_damage(str(error)):
            raise _undecodable("JPEG", name, error) from error
        return _decode_with_pillow("JPEG", data, name, channels, max_pixels)
    return pixels


def _is_damage(text: str) -> bool:
    """Whether a JPEG's pixels are wrong or missing, by libjpeg's words; Pillow would give a picture, half gray."""
    return "extraneous bytes" not in text and ("Corrupt" in text or "Premature" in text)


def _decode_with_pillow(
    kind: str, data: bytes | bytearray | memoryview, name: str, channels: int, max_pixels: int
) -> NDArray[np.uint8]:
    if kind == "WebP":  # Pillow takes the memory for one when it opens it
        _check_size(kind, name, *_webp_size(data, name), max_pixels)
    image = _opened(kind, data, name)
    _check_size(kind, name, image.height, image.width, max_pixels)
    try:
        return _pixels(image, kind, name, channels, max_pixels)
    except DataError:
        raise
    except Exception as error:  # broken files make Pillow raise almost anything
        raise _undecodable(kind, name, error) from error


def _opened(kind: str, data: bytes | bytearray | memoryview, name: str) -> Any:
    """Pillow's view of a file: the header is read, the pixels are not."""
    module, reader = _READERS[kind]
    try:
        return getattr(importlib.import_module(module), reader)(io.BytesIO(data))
    except Exception as error:  # same
        raise _undecodable(kind, name, error) from error


def _pixels(image: Any, kind: str, name: str, channels: int, max_pixels: int) -> NDArray[np.uint8]:
    if image.mode.startswith("I;16") or (image.mode == "I" and kind == "PNG"):
        gray = (np.asarray(image) >> 8).astype(np.uint8)[:, :, np.newaxis]
        return np.repeat(gray, channels, axis=2)
    if image.mode in ("I", "F"):
        raise DataError(f"{name} is a {kind} with samples of 32 bits; give one with samples of 8 or 16 bits")
    if kind == "TIFF":
        _check_tiles(image, name, max_pixels)
    image.load()
    image.info.pop("transparency", None)  # what a conversion would warn about
    pixels = np.array(image.convert("RGB" if channels == 3 else "L"))
    return pixels.reshape(image.height, image.width, channels)


def _check_tiles(image: Any, name: str, max_pixels: int) -> None:
    """A TIFF's tiles, and strips, may be larger than the picture, and take memory all the same."""
    tags = image.tag_v2
    width, height = int(tags.get(322, 0)), int(tags.get(323, 0))
    rows = min(int(tags.get(278, 0)), image.height)
    if max(width * height, rows * image.width) > max_pixels:
        raise DataError(f"{name} is a TIFF with tiles of {width} x {height}, above the limit of {max_pixels} pixels")


def _webp_size(data: bytes | bytearray | memoryview, name: str) -> tuple[int, int]:
    head = bytes(data[:30])
    chunk = head[12:16]
    if chunk == b"VP8X" and len(head) == 30:
        return 1 + int.from_bytes(head[27:30], "little"), 1 + int.from_bytes(head[24:27], "little")
    if chunk == b"VP8 " and len(head) == 30:
        width, height = struct.unpack("<HH", head[26:30])
        return height & 0x3FFF, width & 0x3FFF
    if chunk == b"VP8L" and len(head) >= 25:
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    raise DataError(f"{name} is a WebP without a header of a known kind, got {chunk!r}; give another file")


def _check_size(kind: str, name: str, height: int, width: int, max_pixels: int) -> None:
    if height < 1 or width < 1:
        raise DataError(f"{name} is a {kind} of {height} x {width} pixels; give one that has pixels")
    if height * width > max_pixels:
        raise DataError(
            f"{name} is a {kind} of {height} x {width} = {height * width} pixels by its header, {max_pixels} are"
            " allowed; give a smaller picture, or raise max_pixels"
        )


def _undecodable(kind: str, name: str, error: Exception) -> DataError:
    said = str(error) or type(error).__name__
    return DataError(f"{name} begins like a {kind} but cannot be decoded ({said}); give a file that is whole")


def _nearest(size: int, wanted: int) -> NDArray[np.intp]:
    scale = np.float32(size) / np.float32(wanted)
    places: NDArray[np.intp] = np.floor(np.arange(wanted, dtype=np.float32) * scale).astype(np.intp)
    return places.clip(max=size - 1)


def _encodable(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3) or not image.size:
        raise DataError(
            f"a picture to encode is {image.dtype} of shape {list(image.shape)}; give uint8 [height, width, 1 or 3]"
        )
    return image
