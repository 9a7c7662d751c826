"""The door's few-shot names: their parameters, and calls as the document shows them; what the door imports."""

import inspect
import subprocess
import sys

import pytest
from PIL import Image

from plait import openks
from plait.openks import Open_KS_Character, Open_KS_ImageNet, Open_KS_read

DOCUMENTED = [
    (Open_KS_ImageNet, ["dir_path"], {}),
    (Open_KS_ImageNet.sample, ["self", "num_images"], {}),
    (Open_KS_ImageNet._read_image, ["self", "name"], {}),
    (Open_KS_Character, ["dir_path", "rotation"], {"rotation": 0}),
    (Open_KS_Character.sample, ["self", "num_images"], {}),
    (Open_KS_Character._read_image, ["self", "name"], {}),
    (Open_KS_read.read_dataset, ["data_dir"], {}),
    (Open_KS_read._read_classes, ["dir_path"], {}),
]


@pytest.mark.parametrize(
    ("function", "names", "defaults"), DOCUMENTED, ids=lambda value: getattr(value, "__name__", "")
)
def test_signatures(function, names, defaults):
    parameters = inspect.signature(function).parameters
    assert list(parameters)[: len(names)] == names
    assert all(parameters[name].default == value for name, value in defaults.items())
    more = list(parameters.values())[len(names) :]
    assert all(parameter.default is not parameter.empty for parameter in more)  # what plait adds may be left out


def test_names():
    assert {"Open_KS_Character", "Open_KS_ImageNet", "Open_KS_read"} <= set(openks.__all__)


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "val", "test"):
        for name in ("n02", "n01"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (30, 20), "red").save(tmp_path / split / name / f"{number}.jpg")
    return tmp_path


@pytest.mark.parametrize("reader", [Open_KS_read, Open_KS_read()], ids=["class", "object"])
def test_reading_as_in_the_document(folder, reader):
    train, val, test = reader.read_dataset(str(folder))
    assert [len(part) for part in (train, val, test)] == [2, 2, 2]
    assert [one.dir_path.rpartition("/")[2] for one in train] == ["n01", "n02"]
    assert isinstance(train[0], Open_KS_ImageNet)
    assert [image.shape for image in train[0].sample(2)] == [(84, 84, 3)] * 2
    assert len(reader._read_classes(str(folder / "val"))) == 2


def test_a_character(folder):
    one = Open_KS_Character(str(folder / "train" / "n01"), 90)
    assert one.sample(1)[0].shape == one._read_image("0.jpg").shape == (28, 28)


def test_the_door_brings_nothing_heavy():
    program = "import sys, plait.openks; print([name for name in ('PIL', 'cv2', 'zmq') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
