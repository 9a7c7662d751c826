import numpy as np

from plait.data.undecoded import Undecoded, whole

RGB = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def test_what_is_not_decoded_yet_looks_like_pixels():
    asked = []

    def upper(rows):
        asked.append(rows)
        return RGB[:rows]

    picture = Undecoded(RGB.shape, upper)
    assert (picture.shape, picture.dtype, picture.ndim, picture.size) == (RGB.shape, RGB.dtype, RGB.ndim, RGB.size)
    for rows, columns in (((2, 9), (3, 50)), ((0, 0), (0, 60)), ((35, 90), (0, 600)), ((None, None), (None, -7))):
        part = slice(*rows), slice(*columns)
        assert np.array_equal(picture[part], RGB[part])
    for rows in (slice(None, -5), slice(-10, -5), slice(None, None, -1), slice(30, 10, -2), slice(1, 9, 3)):
        assert np.array_equal(picture[rows, 3:5], RGB[rows, 3:5])
        assert np.array_equal(Undecoded(RGB.shape, lambda rows: RGB[:rows])[rows, 3:5], RGB[rows, 3:5])
    assert asked == [9, 40]  # the rows that it has are not decoded again
    assert whole(picture) is picture.whole()
    assert np.array_equal(whole(picture), RGB)
    assert whole(RGB) is RGB
    assert whole("a word") == "a word"
    assert asked == [9, 40]
