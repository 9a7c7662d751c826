from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import plait
from plait import mox, nets
from plait.errors import ConfigError, DataError
from plait.mox.nets import default_preprocess_fn


@pytest.fixture(autouse=True)
def model():
    made = plait.Model()
    with made.scope():
        yield made


def pictures(count=2, size=32, channels=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, size, size, channels), dtype=torch.uint8, generator=generator)


def test_logits_and_end_points(model):
    logits, points = mox.get_model_fn("resnet_v1_20", mox.ModeKeys.TRAIN, 7)(pictures())
    assert logits.shape == (2, 7)
    assert points["resnet_v1_20/block2"].shape == (2, 16, 16, 32)
    assert torch.allclose(points["predictions"].sum(1), torch.ones(2))
    assert "resnet_v1_20/block1/unit_1/conv1/weights" in model.variables()


def test_it_is_the_network_itself_behind_the_normalisation(model):
    images = pictures()
    logits, _ = mox.get_model_fn("resnet_v1_20", mox.ModeKeys.EVAL, 10)(images)
    net = nets.build("resnet_v1_20", 10).eval()
    values = model.variables()
    own = {name.replace(".", "/"): value for name, value in [*net.named_parameters(), *net.named_buffers()]}
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(values[f"resnet_v1_20/{name}"])
    ready = images.float()
    deviation, mean = torch.std_mean(ready, (1, 2, 3), correction=0, keepdim=True)
    expected, _ = net(((ready - mean) / deviation).permute(0, 3, 1, 2).contiguous())
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_both_orders_give_the_same_numbers():
    found = {}
    for data_format in ("NHWC", "NCHW"):
        with plait.Model().scope():
            found[data_format] = mox.get_model_fn("resnet_v1_20", mox.ModeKeys.EVAL, 10, data_format=data_format)(
                pictures()
            )
    assert torch.allclose(found["NHWC"][0], found["NCHW"][0], rtol=1e-4, atol=1e-5)
    last, first = found["NHWC"][1]["resnet_v1_20/block1"], found["NCHW"][1]["resnet_v1_20/block1"]
    assert torch.allclose(last, first.permute(0, 2, 3, 1), rtol=1e-4, atol=1e-4)


def test_weight_decay_goes_into_the_collection(model):
    mox.get_model_fn("resnet_v1_20", mox.ModeKeys.TRAIN, 10, weight_decay=0.02)(pictures())
    (loss,) = mox.get_collection(mox.GraphKeys.REGULARIZATION_LOSSES)
    weights = [value for name, value in model.variables().items() if name.endswith("/weights")]
    assert len(weights) == 20
    assert torch.isclose(loss, 0.01 * sum(value.square().sum() for value in weights))


def test_no_weight_decay_no_loss():
    mox.get_model_fn("resnet_v1_20", mox.ModeKeys.TRAIN, 10)(pictures())
    assert mox.get_collection(mox.GraphKeys.REGULARIZATION_LOSSES) == []


def test_training_and_evaluation_differ(model):
    train = mox.get_model_fn("resnet_v1_20", mox.ModeKeys.TRAIN, 10)
    logits, _ = train(pictures())
    before = model.variables()["resnet_v1_20/conv1/BatchNorm/moving_mean"].clone()
    with plait.variable_scope("other"):
        other, _ = mox.get_model_fn("resnet_v1_20", mox.ModeKeys.EVAL, 10)(pictures())
    assert not before.eq(0).all()
    assert model.variables()["other/resnet_v1_20/conv1/BatchNorm/moving_mean"].eq(0).all()
    assert not torch.allclose(logits, other, rtol=1e-2)


def test_batch_renorm_has_state_of_its_own(model):
    mox.get_model_fn("resnet_v1_20", mox.ModeKeys.TRAIN, 10, batch_renorm=True)(pictures())
    assert int(model.variables()["resnet_v1_20/conv1/BatchNorm/renorm_steps"]) == 1


def test_the_number_of_channels_is_that_of_the_pictures(model):
    mox.get_model_fn("lenet", mox.ModeKeys.TRAIN, 10)(pictures(size=28, channels=3))
    assert model.variables()["LeNet/conv1/weights"].shape == (32, 3, 5, 5)


def test_a_preprocess_fn_of_ones_own():
    seen = []

    def preprocess_fn(images, run_mode, *args):
        seen.append((images.dtype, run_mode))
        return images.float().permute(0, 3, 1, 2)

    mox.get_model_fn("lenet", mox.ModeKeys.EVAL, 10, data_format="NCHW", preprocess_fn=preprocess_fn)(
        pictures(size=28, channels=1)
    )
    assert seen == [(torch.uint8, "EVAL")]


def test_no_preprocess_fn_takes_what_is_given():
    images = torch.randn(2, 1, 28, 28)
    logits, _ = mox.get_model_fn("lenet", "EVAL", 10, data_format="NCHW", preprocess_fn=None)(images)
    assert logits.shape == (2, 10)


@pytest.mark.parametrize("mode", ["PREDICT", "EXPORT"])
def test_pictures_are_scaled_for_serving(mode):
    network_fn = mox.get_model_fn("lenet", mode, 10, image_height=28, image_width=28)
    logits, _ = network_fn(pictures(size=40, channels=1))
    assert logits.shape == (2, 10)


def test_scaling_equals_torch():
    images = pictures(size=40, channels=1)
    logits, _ = mox.get_model_fn("lenet", "PREDICT", 10, image_height=28, image_width=28)(images)
    small = functional.interpolate(images.permute(0, 3, 1, 2).float(), (28, 28), mode="bilinear")
    with plait.Model().scope():
        expected, _ = mox.get_model_fn("lenet", "EVAL", 10)(small.permute(0, 2, 3, 1))
    assert torch.allclose(logits, expected, atol=1e-5)


def test_the_default_normalisation_is_public_in_its_module():
    ready = default_preprocess_fn(pictures(), "TRAIN", "inception_v3", "NCHW")
    assert ready.shape == (2, 3, 32, 32)
    assert ready.min() >= -1
    assert ready.max() <= 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "resnet_v1_51"}, "resnet_v1_50"),
        ({"run_mode": "train"}, "ModeKeys.TRAIN"),
        ({"data_format": "CHWN"}, "'NHWC' or 'NCHW'"),
        ({"run_mode": "EXPORT"}, "image_height= and image_width="),
        ({"num_classes": 0}, "at least 1"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_errors_say_what_to_write(arguments, said):
    given = {"name": "resnet_v1_20", "run_mode": "TRAIN", "num_classes": 10, **arguments}
    with pytest.raises(ConfigError, match=said):
        mox.get_model_fn(**given)(pictures())


def test_pictures_without_a_batch_dimension_are_refused():
    with pytest.raises(DataError, match="4 dimensions"):
        mox.get_model_fn("lenet", "TRAIN", 10)(pictures()[0])


def test_channels_in_the_wrong_place_are_noticed():
    images = pictures().permute(0, 3, 1, 2)
    with pytest.raises(DataError, match="looks like"):
        mox.get_model_fn("resnet_v1_20", "TRAIN", 10, data_format="NCHW")(images)


@pytest.mark.parametrize("name", ["resnet_v1_50", "pvanet", "nasnet_cifar"])
def test_a_last_batch_of_one_picture_trains(name):
    size = {"pvanet": 192}.get(name, 32)
    logits, _ = mox.get_model_fn(name, "TRAIN", 10)(pictures(1, size))
    assert torch.isfinite(logits).all()


def test_meta():
    meta = mox.get_model_meta("inception_v3")
    assert (meta.default_image_size, meta.default_labels_offset, meta.default_logits_pattern) == (299, 0, "Logits")
    with pytest.raises(ConfigError, match="plait nets"):
        mox.get_model_meta("lenett")
