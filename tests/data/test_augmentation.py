import colorsys
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data import augmentation
from plait.data.augmentation import FAMILIES, augment
from plait.data.pictures import opencv, resize
from plait.errors import ConfigError, DataError

VGG, INCEPTION, CIFARNET = "vgg_preprocessing", "inception_preprocessing", "cifarnet_preprocessing"
LENET, PVANET = "lenet_preprocessing", "pvanet_preprocessing"


def noise(height=375, width=500, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def smooth(height=375, width=500):
    coarse = noise(height // 12, width // 12)
    return opencv().resize(coarse, (width, height), interpolation=opencv().INTER_CUBIC)


def rng(seed=0):
    return np.random.default_rng(seed)


class Script:
    """Gives the random numbers that a test wants."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0)


def levels(left, right):
    return np.abs(left.astype(int) - right.astype(int))


def sizes_for(family):
    return (28, 32) if family == CIFARNET else (40, 48)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_recipe_on_bytes_and_floats(family, training, channels):
    height, width = sizes_for(family)
    recipe = augment(family, training, height, width)
    for image in (noise(50, 60, channels), noise(32, 32, channels)):
        before = image.copy()
        made = recipe(image, rng(1))
        assert (made.shape, made.dtype) == ((height, width, channels), np.uint8)
        assert made.flags.c_contiguous
        assert made.flags.writeable
        assert not np.shares_memory(made, image)
        assert np.array_equal(image, before)
        assert np.array_equal(recipe(image, rng(1)), made)
        assert np.array_equal(recipe(image[:, ::-1][:, ::-1], rng(1)), made)
        floats = recipe(image.astype(np.float32), rng(1))
        assert floats.dtype == np.float32
        assert 0 <= floats.min() <= floats.max() <= 255
        assert np.array_equal(recipe(image.astype(np.float64), rng(1)), floats)
        assert levels(np.rint(floats), made).max() <= 2  # rounded twice, and scaled by up to 1.8 in between
        assert np.array_equal(recipe(image, rng(2)), made) != (training and family != LENET)


def test_recipes_can_be_sent_to_other_processes():
    recipe = augment(INCEPTION, True, 20, 20, fast_mode=False)
    assert np.array_equal(pickle.loads(pickle.dumps(recipe))(noise(), rng()), recipe(noise(), rng()))


def test_what_is_drawn_moves_the_generator_alike_for_alike_pictures():
    for family in (VGG, CIFARNET):
        recipe = augment(family, True, 32, 32)
        one, two = rng(5), rng(5)
        recipe(noise(40, 50, seed=1), one)
        recipe(noise(40, 50, seed=2), two)
        assert one.random() == two.random()


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("resnet_v1_50", True, 224, 224), {}, "no augmentation 'resnet_v1_50'; write one of cifarnet_preprocessing,"),
        ((VGG, True, None, 224), {}, "output_height is None; vgg_preprocessing needs the size"),
        ((LENET, True, 28, 0), {}, "output_width is 0"),
        ((VGG, True, 224, 224), {"fast_mode": True}, "no option 'fast_mode'; it has resize_side_min, resize_side_max"),
        ((LENET, True, 28, 28), {"padding": 4}, "no option 'padding'; it has none"),
        ((VGG, False, 299, 299), {}, "299 x 299 cannot be cut .* 256 to 512; write resize_side_min=299 or more"),
        ((VGG, True, 224, 224), {"resize_side_min": 300, "resize_side_max": 299}, "300 to 299"),
    ],
)
def test_wrong_settings_are_errors(arguments, options, text):
    with pytest.raises(ConfigError, match=text):
        augment(*arguments, **options)


def test_wrong_pictures_are_errors():
    recipe = augment(VGG, True, 224, 224)
    for wrong in (noise()[:, :, 0], noise(channels=4), noise()[:0], noise()[np.newaxis]):
        with pytest.raises(DataError, match=r"shape .*; give \[height, width, 1 or 3 channels\]"):
            recipe(wrong, rng())
    with pytest.raises(DataError, match="is int64; give uint8 or float32"):
        recipe(noise().astype(np.int64), rng())
    with pytest.raises(DataError, match="20 x 50 with 4 pixels around it is smaller than the output of 32 x 32"):
        augment(CIFARNET, True, 32, 32)(noise(20, 50), rng())


def whole_then_crop(image, scaled, start, size):
    whole = resize(image, *scaled)
    return whole[start[0] : start[0] + size[0], start[1] : start[1] + size[1]]


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (333, 500), (120, 90), (1200, 1600)])
def test_scaling_only_the_crop_is_scaling_the_picture_and_cropping(height, width):
    draws = rng(3)
    for _ in range(6):
        side = int(draws.integers(256, 513))
        scaled = augmentation._short_side(noise(height, width), side)
        start = tuple(int(draws.integers(0, length - 223)) for length in scaled)
        for image, most in ((noise(height, width), 0.02), (smooth(height, width), 0.0)):
            got = augmentation._scaled_part(image, scaled, start, (224, 224))
            off = levels(got, whole_then_crop(image, scaled, start, (224, 224)))
            assert (off > 2).mean() <= most
            assert off.mean() < 0.8


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_parts_of_pictures_of_any_size(data):
    """A ramp, on which a shift by a pixel of the source is 1."""
    length, scaled = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 700))
    size = data.draw(st.integers(1, scaled))
    start = data.draw(st.integers(0, scaled - size))
    ramp = np.arange(length, dtype=np.float32).reshape(1, length, 1)
    got = augmentation._scaled_part(ramp, (1, scaled), (0, start), (1, size))
    assert got.shape == (1, size, 1)
    assert np.abs(got - whole_then_crop(ramp, (1, scaled), (0, start), (1, size))).max() < 1 / 60


@pytest.mark.parametrize("scaled", [373, 374, 375, 376, 377])
def test_parts_of_pictures_that_keep_about_their_size(scaled):
    """OpenCV takes a picture whose size does not change for one that does not change."""
    image = smooth(375, 375)
    for start in ((0, 0), (70, 131), (149, 149)):
        got = augmentation._scaled_part(image, (scaled, scaled), start, (224, 224))
        assert levels(got, whole_then_crop(image, (scaled, scaled), start, (224, 224))).max() <= 1


def test_little_more_than_the_crop_is_computed():
    draws, computed = rng(0), []
    for _ in range(500):
        side = int(draws.integers(256, 513))
        left = int(draws.integers(0, side - 223))
        begin, end, dropped, factor = augmentation._aligned(375, side, left, 224, 64)
        assert 0 <= begin < end <= 375
        assert factor == pytest.approx(side / 375, rel=1e-3)
        computed.append((dropped + 224) / 224)
    assert np.mean(computed) < 1.15


def test_vgg_draws_side_place_and_mirror():
    image = smooth()
    train = augment(VGG, True, 224, 224)
    for side, draw in ((256, 0.0), (384, (128 + 0.5) / 257), (512, 0.9999)):
        scaled = (side, round(500 * side / 375))
        room = [length - 224 for length in scaled]
        for at in (0.0, 0.5, 0.9999):
            start = [int(at * (space + 1)) for space in room]
            expected = whole_then_crop(image, scaled, start, (224, 224))
            # an eighth of a pixel off at most; the picture rises by some 20 levels a pixel at its steepest
            assert levels(train(image, Script(draw, at, at, 0.5)), expected).max() <= 5
            assert levels(train(image, Script(draw, at, at, 0.49)), expected[:, ::-1]).max() <= 5


def test_vgg_sides_can_be_set():
    image = smooth()
    options = {"resize_side_min": 320, "resize_side_max": 320}
    got = augment(VGG, True, 299, 299, **options)(image, Script(0.7, 0.0, 0.0, 0.9))
    assert levels(got, whole_then_crop(image, (320, 427), (0, 0), (299, 299))).max() <= 2
    got = augment(VGG, False, 299, 299, **options)(image, rng())
    assert levels(got, whole_then_crop(image, (320, 427), (10, 64), (299, 299))).max() <= 2


def test_vgg_evaluation_takes_the_middle():
    for image, scaled, start in ((smooth(), (256, 341), (16, 58)), (smooth(500, 375), (341, 256), (58, 16))):
        got = augment(VGG, False, 224, 224)(image, Script())
        assert levels(got, whole_then_crop(image, scaled, start, (224, 224))).max() <= 2


@pytest.mark.parametrize(("height", "width", "kept"), [(375, 500, (329, 438)), (400, 600, (350, 526))])
def test_inception_evaluation_takes_the_middle(height, width, kept):
    image = noise(height, width)
    got = augment(INCEPTION, False, *kept)(image, Script())
    top, left = (height - kept[0]) // 2, (width - kept[1]) // 2
    assert np.array_equal(got, image[top : top + kept[0], left : left + kept[1]])
    assert augment(INCEPTION, False, 299, 299)(image, Script()).shape == (299, 299, 3)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (30, 400), (7, 5), (1, 1)])
def test_inception_boxes(height, width):
    draws, areas, places = rng(1), [], []
    for _ in range(2000):
        top, left, box_height, box_width = augmentation._distorted_box(height, width, draws)
        assert 0 <= top <= top + box_height <= height
        assert 0 <= left <= left + box_width <= width
        areas.append(box_height * box_width / (height * width))
        places.append((top == 0, top + box_height == height, left == 0, left + box_width == width))
        if (box_height, box_width) != (height, width):
            assert 0.75 * box_height - 0.5 <= box_width <= 1.33 * box_height + 0.5
            assert areas[-1] >= 0.1
    assert np.any(places, axis=0).all()
    if min(height, width) > 100:
        assert 0.1 <= min(areas) < 0.12
        assert max(areas) > 0.9


def test_a_strip_has_no_box_and_is_taken_whole():
    assert augmentation._distorted_box(10, 1000, rng()) == (0, 0, 10, 1000)


def test_inception_crops_scales_mirrors_and_colours():
    image = noise(60, 60)
    # a square of 60, at 0, 0; mirrored; no change of colour
    box = [(1 - 0.75) / (1.33 - 0.75), 0.9999, 0.0, 0.0]
    got = augment(INCEPTION, True, 30, 40)(image, Script(*box, 0.4, 0.5, 0.5))
    assert levels(got, resize(image, 30, 40)[:, ::-1]).max() <= 1
    brighter = augment(INCEPTION, True, 60, 60)(image, Script(*box, 0.6, 1.0, 0.5))
    assert levels(brighter, np.minimum(image.astype(int) + 32, 255)).max() <= 1
    darker = augment(INCEPTION, True, 60, 60)(np.maximum(image, 32), Script(*box, 0.6, 0.0, 0.5))
    assert levels(darker, np.maximum(image, 32) - 32).max() <= 1


def planes_of(image):
    return [np.ascontiguousarray(image[:, :, channel], dtype=np.float32) for channel in range(image.shape[2])]


@pytest.mark.parametrize("draw", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_saturation_is_that_of_hsv(draw):
    image = noise(12, 12)
    image[0] = [[0, 0, 0], [255, 255, 255], [7, 7, 7], [255, 0, 0], [0, 255, 255], [1, 0, 0]] * 2
    got = np.dstack(augmentation._saturation(planes_of(image), Script(draw)))
    for pixel, made in zip(image.reshape(-1, 3), got.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255.0))
        expected = colorsys.hsv_to_rgb(hue, min(saturation * (0.5 + draw), 1.0), value)
        assert made / 255 == pytest.approx(expected, abs=1e-5)


def test_saturation_outside_of_the_range():
    """After a change of brightness; as TensorFlow has it, what is not above 0 has no colour."""
    planes = [np.array([[-20.0, 270, -5]], np.float32), np.array([[-3.0, 100, 40]], np.float32)]
    planes.append(np.array([[-9.0, 50, 12]], np.float32))
    got = np.dstack(augmentation._saturation(planes, Script(1.0)))[0]
    assert got[0].tolist() == pytest.approx([-3, -3, -3])
    assert got[1].tolist() == pytest.approx([270, 270 - 170 * 270 / 220, 0], abs=1e-3)
    assert got[2].tolist() == pytest.approx([0, 40, 40 - 28 * 40 / 45], abs=1e-3)


@pytest.mark.parametrize("draw", [0.0, 0.35, 0.5, 1.0])
def test_hue_is_that_of_hsv(draw):
    image = noise(12, 12)
    got = np.dstack(augmentation._hue(planes_of(image), Script(draw)))
    for pixel, made in zip(image.reshape(-1, 3), got.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255.0))
        expected = colorsys.hsv_to_rgb((hue + (2 * draw - 1) * 0.2) % 1.0, saturation, value)
        assert made / 255 == pytest.approx(expected, abs=1e-3)


def test_contrast_is_about_the_mean_of_each_channel():
    image = noise(9, 9).astype(np.float32)
    got = np.dstack(augmentation._contrast(planes_of(image), Script(0.25)))
    means = image.mean(axis=(0, 1))
    np.testing.assert_allclose(got, (image - means) * 0.75 + means, atol=1e-3)


def test_slow_inception_draws_a_method_an_order_and_four_changes():
    box = [(1 - 0.75) / (1.33 - 0.75), 0.9999, 0.0, 0.0]
    for order in range(4):
        numbers = Script(*box, 0.3, 0.9, order / 4, 0.5, 0.5, 0.5, 0.5)
        got = augment(INCEPTION, True, 60, 60, fast_mode=False)(noise(60, 60), numbers)
        assert numbers.numbers == []
        assert levels(got, noise(60, 60)).max() <= 1
    assert {change for order in augmentation._COLOUR_ORDERS for change in order} == set(augmentation._COLOUR_CHANGES)
    made = {augment(INCEPTION, True, 30, 30, fast_mode=False)(noise(), rng(seed)).tobytes() for seed in range(20)}
    assert len(made) == 20


def test_cifarnet_pads_crops_mirrors_and_colours():
    image = noise(32, 32)
    train = augment(CIFARNET, True, 32, 32)
    same = (0.5, 0.5)  # no brightness, contrast 1
    assert np.array_equal(train(image, Script(4.5 / 9, 4.5 / 9, 0.9, *same)), image)
    assert np.array_equal(train(image, Script(4.5 / 9, 4.5 / 9, 0.1, *same)), image[:, ::-1])
    corner = train(image, Script(0.0, 0.9999, 0.9, *same))
    assert np.array_equal(corner[4:, :-4], image[:-4, 4:])
    assert corner[:4].max() == corner[:, -4:].max() == 0
    middle = np.full((32, 32, 3), 100, np.uint8)
    assert np.unique(train(middle, Script(4.5 / 9, 4.5 / 9, 0.9, 1.0, 0.9))).tolist() == [163]
    got = train(image, Script(4.5 / 9, 4.5 / 9, 0.9, 0.0, 1.0)).astype(float)
    means = image.mean(axis=(0, 1))
    np.testing.assert_allclose(got, np.clip((image - means) * 1.8 + means - 63, 0, 255), atol=0.51)


@pytest.mark.parametrize("family", [CIFARNET, LENET])
def test_cropping_or_padding_around_the_middle(family):
    image = noise(6, 9)
    got = augment(family, False, 9, 4)(image, Script())
    expected = np.zeros((9, 4, 3), np.uint8)
    expected[1:7] = image[:, 2:6]
    assert np.array_equal(got, expected)
    assert np.array_equal(augment(family, False, 6, 9)(image, Script()), image)


def test_lenet_trains_as_it_evaluates():
    assert np.array_equal(
        augment(LENET, True, 28, 28)(noise(40, 20), Script()), augment(LENET, False, 28, 28)(noise(40, 20), Script())
    )


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (10, 400), (400, 10), (1, 1)])
def test_pvanet_boxes(height, width):
    draws, areas = rng(2), []
    for _ in range(1000):
        top, left, box_height, box_width = augmentation._resized_box(height, width, draws)
        assert 0 <= top <= top + box_height <= height
        assert 0 <= left <= left + box_width <= width
        assert 0.72 <= box_width / box_height <= 1.38
        areas.append(box_height * box_width / (height * width))
    if min(height, width) > 100:
        assert min(areas) < 0.1
        assert 0.4 < np.mean(areas) < 0.5  # large ones fit less often


def test_pvanet_crops_scales_and_mirrors():
    image = noise(50, 50)
    train = augment(PVANET, True, 20, 30)
    assert np.array_equal(train(image, Script(0.99999, 0.5, 0.0, 0.0, 0.9)), resize(image, 20, 30))
    assert np.array_equal(train(image, Script(0.99999, 0.5, 0.0, 0.0, 0.1)), resize(image, 20, 30)[:, ::-1])


def test_pvanet_evaluation_takes_the_middle():
    image = smooth()
    got = augment(PVANET, False, 192, 192)(image, Script())
    assert levels(got, whole_then_crop(image, (219, 292), (13, 50), (192, 192))).max() <= 2
