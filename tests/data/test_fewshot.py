"""Folders as few-shot classes: what is read, in which shape, which is drawn; and what is said of bad folders."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from plait.data import fewshot
from plait.data.episodes import EpisodeSource
from plait.data.fewshot import (
    CharacterClass,
    ImageClass,
    read_characters,
    read_classes,
    read_dataset,
    split_classes,
    with_rotations,
)
from plait.errors import ConfigError, DataError


def photo(path, color, size=(100, 60)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def character(path, mark=(10, 10, 30, 90), size=105):
    """A black bar on white paper, as a drawing of one bit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("1", (size, size), 1)
    ImageDraw.Draw(image).rectangle(mark, fill=0)
    image.save(path)


@pytest.fixture
def photos(tmp_path):
    for number in range(6):
        photo(tmp_path / "n01" / f"{number}.png", (40 * number, 10, 255))
    return tmp_path / "n01"


def test_images_are_84_by_84_by_3_floats_from_0_to_1(photos):
    images = ImageClass(photos).sample(6)
    assert [image.shape for image in images] == [(84, 84, 3)] * 6
    assert all(image.dtype == np.float32 for image in images)
    assert sorted(round(float(image[3, 3, 0]) * 255) for image in images) == [0, 40, 80, 120, 160, 200]
    assert all(image[..., 2].min() == image[..., 2].max() == 1 for image in images)


def test_size_sets_another(photos):
    assert ImageClass(photos, size=12).sample(1)[0].shape == (12, 12, 3)
    with pytest.raises(ConfigError, match="size is 0"):
        ImageClass(photos, size=0)


def test_a_picture_is_read_from_disk_once_and_kept_as_bytes(photos):
    one = ImageClass(photos)
    first = one._read_image("3.png")
    (photos / "3.png").unlink()
    again = one._read_image("3.png")
    assert np.array_equal(first, again)
    assert one._cache["3.png"].dtype == np.uint8
    again[:] = 7  # what was handed out is the caller's
    assert np.array_equal(one._read_image("3.png"), first)


def drawn(one, count, rng=None):
    return [round(float(image[0, 0, 0]) * 255) // 40 for image in one.sample(count, rng)]


def test_draws_are_different_pictures_by_the_classs_own_generator(photos):
    one = ImageClass(photos, seed=5)
    first, second = drawn(one, 4), drawn(one, 4)
    assert len(set(first)) == 4
    np.random.seed(3)  # noqa: NPY002 - the global state is meant
    again = ImageClass(photos, seed=5)
    assert [drawn(again, 4), drawn(again, 4)] == [first, second]
    orders = {tuple(drawn(ImageClass(photos, seed=seed), 6)) for seed in range(10)}
    assert len(orders) > 5


def test_a_generator_of_ones_own(photos):
    given = [drawn(ImageClass(photos, seed=seed), 6, np.random.default_rng(1)) for seed in (0, 1)]
    assert given[0] == given[1] == drawn(ImageClass(photos, rng=np.random.default_rng(1)), 6)


def test_the_listing_is_sorted_and_takes_all_spellings(tmp_path):
    for name in ("b.JPEG", "a.jpg", "d.png", "c.jpeg", "e.JPG"):
        photo(tmp_path / name, "red")
    (tmp_path / "notes.txt").write_text("no picture")
    photo(tmp_path / ".hidden.png", "red")
    assert ImageClass(tmp_path).names == ["a.jpg", "b.JPEG", "c.jpeg", "d.png", "e.JPG"]
    assert len(ImageClass(tmp_path)) == 5


def test_more_than_there_are(photos):
    with pytest.raises(DataError, match=r"7 pictures were asked of .*n01', which has 6; ask for fewer"):
        ImageClass(photos).sample(7)


def test_bad_folders(tmp_path):
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        ImageClass(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"has no picture among its 1 entries; a class needs \.jpg"):
        ImageClass(tmp_path)
    with pytest.raises(DataError, match="has no folder in it"):
        read_classes(tmp_path)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: b"no picture", lambda data: data[: len(data) // 2]])
def test_a_file_that_cannot_be_decoded_is_named(tmp_path, damage):
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (50, 50, 3), np.uint8)).save(tmp_path / "torn.png")
    (tmp_path / "torn.png").write_bytes(damage((tmp_path / "torn.png").read_bytes()))
    with pytest.raises(DataError, match=r"torn\.png' is no picture that can be read: .*replace or delete"):
        ImageClass(tmp_path).sample(1)


def test_a_picture_of_too_many_pixels_is_not_decoded(photos, monkeypatch):
    monkeypatch.setattr(fewshot, "MAX_PIXELS", 5999)
    with pytest.raises(DataError, match=r"has 100 x 60 pixels; make it smaller"):
        ImageClass(photos).sample(1)


def test_characters_are_28_by_28_with_white_paper(tmp_path):
    character(tmp_path / "0.png")
    image = CharacterClass(tmp_path).sample(1)[0]
    assert image.shape == (28, 28)
    assert image.dtype == np.float32
    assert image[14, 5] == 0  # ink
    assert image[14, 20] == image[27, 27] == 1  # paper
    assert CharacterClass(tmp_path, size=20).sample(1)[0].shape == (20, 20)


@pytest.mark.parametrize("column", range(20, 40))
def test_a_line_of_one_pixel_is_not_lost(tmp_path, column):
    character(tmp_path / "0.png", (column, 10, column, 90))
    image = CharacterClass(tmp_path).sample(1)[0]
    assert 0.24 < (1 - image[14]).sum() < 0.34  # a new pixel is the mean of three or four columns


def test_rotations_turn_against_the_clock(tmp_path):
    character(tmp_path / "0.png")
    upright = CharacterClass(tmp_path).sample(1)[0]
    for rotation in (90, 180, 270, 360):
        turned = CharacterClass(tmp_path, rotation).sample(1)[0]
        assert np.array_equal(turned, np.rot90(upright, rotation // 90))
    slanted = CharacterClass(tmp_path, 45).sample(1)[0]
    assert slanted[0, 0] == slanted[27, 27] == 1  # the corners that turn in are paper


def test_ink_on_nothing_is_ink_on_paper(tmp_path):
    image = Image.new("RGBA", (56, 56), (0, 0, 0, 0))
    ImageDraw.Draw(image).rectangle((0, 0, 20, 55), fill=(0, 0, 0, 255))
    image.save(tmp_path / "0.png")
    found = CharacterClass(tmp_path).sample(1)[0]
    assert found[5, 2] == 0
    assert found[5, 25] == 1


def test_read_dataset_gives_train_val_and_test(tmp_path):
    for split, count in (("train", 3), ("val", 1), ("test", 2)):
        for number in reversed(range(count)):
            photo(tmp_path / split / f"kind{number}" / "0.jpg", "blue")
    parts = read_dataset(tmp_path)
    assert [[one.dir_path.rpartition("/")[2] for one in part] for part in parts] == [
        ["kind0", "kind1", "kind2"], ["kind0"], ["kind0", "kind1"],
    ]  # fmt: skip
    assert read_dataset(tmp_path, size=9)[0][0].sample(1)[0].shape == (9, 9, 3)
    (tmp_path / "val").rename(tmp_path / "validation")
    with pytest.raises(DataError, match="has no folder 'val'; it needs train, val and test"):
        read_dataset(tmp_path)


@pytest.fixture
def alphabets(tmp_path):
    for alphabet in ("Latin", "Greek"):
        for number in range(5):
            for drawing in range(3):
                character(tmp_path / alphabet / f"character{number:02}" / f"{drawing}.png", (10 * number, 0, 60, 60))
    (tmp_path / "Latin" / "extra").mkdir()
    return tmp_path


def test_read_characters(alphabets):
    found = read_characters(alphabets)
    names = [one.dir_path.removeprefix(str(alphabets)) for one in found]
    assert names == [f"/{alphabet}/character{number:02}" for alphabet in ("Greek", "Latin") for number in range(5)]
    for folder in (alphabets / "Latin").iterdir():
        (folder / "deeper").mkdir()
    with pytest.raises(DataError, match=r"has 6 folders, but no character\* in any"):
        read_characters(alphabets / "Latin")


def test_split_and_rotations(alphabets):
    classes = read_characters(alphabets)
    train, test = split_classes(classes, 7, seed=1)
    assert (len(train), len(test)) == (7, 3)
    assert sorted(map(id, [*train, *test])) == sorted(map(id, classes))
    assert split_classes(classes, 7, seed=1) == (train, test)
    assert len({tuple(map(id, split_classes(classes, 7, seed=seed)[0])) for seed in range(8)}) > 1
    turned = with_rotations(train)
    assert [one.rotation for one in turned[:4]] == [0, 90, 180, 270]
    assert len(turned) == 28
    assert np.array_equal(turned[1]._read_image("0.png"), np.rot90(train[0]._read_image("0.png")))
    for wrong in (0, 10):
        with pytest.raises(ConfigError, match=f"num_train is {wrong} of 10 classes"):
            split_classes(classes, wrong)


def test_episodes_of_folders(alphabets):
    with pytest.raises(DataError, match=r"class 0 in '.*character00' has 3 samples, and a task needs shots=3"):
        EpisodeSource(read_characters(alphabets), ways=2, shots=3, queries=1)
    source = EpisodeSource(with_rotations(read_characters(alphabets)), ways=5, shots=2, queries=1)
    first = next(source.batches(0, 3))
    assert first["support_x"].shape == (10, 28, 28)
    again = EpisodeSource(with_rotations(read_characters(alphabets)), ways=5, shots=2, queries=1)
    list(again.batches(1, 990))  # drawing others changes nothing
    assert torch.equal(next(again.batches(0, 3))["x"], first["x"])
