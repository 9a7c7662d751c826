from __future__ import annotations

import json

import pytest
import torch

import plait
from plait.engine.settings import (
    CONFIG_VARIABLE,
    GradientConfig,
    RunConfig,
    SessionConfig,
    check_count,
    check_opt_config,
    check_sync_optimizer_config,
    read_config,
)
from plait.errors import ConfigError

TOML = """
[cluster]
worker_num = 2
worker_id = 1
role = "ps"

[checkpoint]
dir = "runs/a"
save_steps = 5
save_secs = 1.5
keep = 2

[fit]
log_step = 7

[model.tower]
width = 64
"""


@pytest.fixture
def written(tmp_path):
    def write(text, name="run.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


class TestSessionConfig:
    def test_defaults(self):
        config = SessionConfig()
        assert (config.device, config.threads, config.precision, config.deterministic) == ("auto", None, "fp32", False)
        assert plait.SessionConfig is SessionConfig

    @pytest.mark.parametrize("given", [None, {}, SessionConfig()])
    def test_nothing_and_an_empty_dict_are_the_defaults(self, given):
        assert SessionConfig.of(given) == SessionConfig()

    def test_a_dict_gives_the_fields(self):
        assert SessionConfig.of({"threads": 2, "device": "cpu"}) == SessionConfig(threads=2, device="cpu")

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"precision": "fp8"}, "precision='fp8' is not known: write one of fp32, tf32, bf16"),
            ({"threads": 0}, "threads=0: write a whole number from 1 on"),
            ({"threads": 1.5}, "threads=1.5: write a whole number"),
            ({"device": "banana"}, "device='banana' is not a device: write 'cpu'"),
            ({"thread": 1}, "session_config has unknown keys thread: it takes device, threads"),
            ("cpu", "session_config is a str: write plait.SessionConfig"),
        ],
    )
    def test_bad_ones_say_what_to_write(self, given, words):
        with pytest.raises(ConfigError, match=words):
            SessionConfig.of(given)

    def test_a_device_that_is_not_there_is_refused(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        with pytest.raises(
            ConfigError, match="device='cuda:1': PyTorch sees 1 CUDA devices here; write 'cpu' or 'auto'"
        ):
            SessionConfig(device="cuda:1").resolved_device()

    @pytest.mark.parametrize(("there", "expected"), [(True, "cuda"), (False, "cpu")])
    def test_auto_takes_a_gpu_if_there_is_one(self, monkeypatch, there, expected):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        assert SessionConfig().resolved_device().type == expected

    @pytest.mark.usefixtures("torch_settings")
    def test_what_was_asked_for_is_set_for_the_process(self):
        SessionConfig(threads=2, deterministic=True, precision="tf32").apply()
        assert torch.get_num_threads() == 2
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "high"

    def test_the_defaults_set_nothing(self, monkeypatch):
        for name in ("set_num_threads", "use_deterministic_algorithms", "set_float32_matmul_precision"):
            monkeypatch.setattr(torch, name, lambda *args: pytest.fail("something was set"))
        SessionConfig().apply()


class TestGradientConfig:
    def test_leaves_gradients_alone_by_default(self):
        config = GradientConfig()
        assert (config.loss_scale, config.clip, config.clip_type) == (1.0, None, "norm")

    def test_takes_names_only(self):
        with pytest.raises(TypeError):
            GradientConfig(2.0)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"clip_type": "size"}, "clip_type='size': write 'norm' or 'value'"),
            ({"loss_scale": 0}, "loss_scale=0, clip=None: write numbers above 0"),
            ({"loss_scale": float("nan")}, "loss_scale=nan, .*: write numbers above 0"),
            ({"clip": 0.0}, "clip=0.0: write numbers above 0"),
            ({"clip": -1}, "clip=-1: write numbers above 0"),
        ],
    )
    def test_bad_ones_say_what_to_write(self, given, words):
        with pytest.raises(ConfigError, match=words):
            GradientConfig(**given)


class TestOptConfig:
    def test_the_documented_defaults_are_fresh_each_time(self):
        first = check_opt_config(None)
        assert first == {"REDUCE": "mean", "BACKEND_MODE": "noise"}
        first["REDUCE"] = "sum"
        assert check_opt_config({})["REDUCE"] == "mean"

    @pytest.mark.parametrize("reduce", ["mean", "sum", torch.mean])
    def test_reduce_is_a_word_or_a_function(self, reduce):
        assert check_opt_config({"REDUCE": reduce})["REDUCE"] is reduce

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"REDUCE": "max"}, "REDUCE='max': write 'mean', 'sum', or a function"),
            ({"BACKEND_MODE": "loud"}, "BACKEND_MODE='loud': write 'noise' or 'unnoise'"),
            ({"reduce": "sum"}, "unknown keys reduce: it takes REDUCE, BACKEND_MODE"),
            ("sum", "opt_config is a str: write a dict of REDUCE, BACKEND_MODE"),
        ],
    )
    def test_bad_ones_say_what_to_write(self, given, words):
        with pytest.raises(ConfigError, match=words):
            check_opt_config(given)

    def test_sync_optimizer_config(self):
        assert check_sync_optimizer_config(None, 1) == {}
        assert check_sync_optimizer_config({"replicas_to_aggregate": 2}, 3) == {"replicas_to_aggregate": 2}

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"replicas_to_aggregate": 2}, "replicas_to_aggregate=2: write 1 to 1, the number of workers"),
            ({"total_num_replicas": "1"}, "total_num_replicas='1': write 1 to 1"),
            ({"replicas": 1}, "unknown keys replicas: it takes replicas_to_aggregate"),
            (3, "sync_optimizer_config is a int: write a dict"),
        ],
    )
    def test_bad_sync_optimizer_config(self, given, words):
        with pytest.raises(ConfigError, match=words):
            check_sync_optimizer_config(given, 1)


class TestFile:
    def expected(self, config):
        assert (config.worker_num, config.worker_id, config.role) == (2, 1, "ps")
        assert (config.checkpoint_dir, config.save_steps, config.save_secs, config.keep) == ("runs/a", 5, 1.5, 2)
        assert config.log_step == 7

    def test_toml(self, written):
        self.expected(read_config(written(TOML)))

    def test_json(self, written):
        values = {
            "cluster": {"worker_num": 2, "worker_id": 1, "role": "ps"},
            "checkpoint": {"dir": "runs/a", "save_steps": 5, "save_secs": 1.5, "keep": 2},
            "fit": {"log_step": 7},
        }
        self.expected(read_config(written(json.dumps(values), "run.json")))

    def test_the_environment_names_one_and_an_argument_goes_first(self, written, monkeypatch):
        monkeypatch.setenv(CONFIG_VARIABLE, str(written(TOML)))
        assert read_config().log_step == 7
        assert read_config(written("[fit]\nlog_step = 3", "other.toml")).log_step == 3

    def test_no_file_is_the_defaults(self):
        assert read_config() == RunConfig()

    def test_tables_of_ones_own_are_found_by_their_path(self, written):
        config = read_config(written(TOML))
        assert config.get("model", "tower", "width") == config.get("model.tower.width") == 64
        assert config.get("model", "tower") == {"width": 64}
        assert config.get("model", "depth") is None
        assert config.get("model.tower.width.more", default=3) == 3

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[fit", "cannot read the configuration .*bad.toml.* Write TOML, or JSON"),
            ("fit = 3", "'fit' must be a table, not int"),
            ("[fit]\nlogstep = 3", r"\[fit\] has unknown keys logstep: it takes log_step"),
            ("[cluster]\nrole = 'king'", "role='king': write 'worker', 'ps', 'leader' or 'follower'"),
            ("[cluster]\nworker_num = '3'", "worker_num='3': write a whole number above 0"),
            ("[cluster]\nworker_num = 0", "worker_num=0: write a whole number above 0"),
            ("[cluster]\nworker_id = 1", "worker_id=1: write 0 to 0, below worker_num"),
            ("[cluster]\nworker_id = 'a'", "worker_id='a': write 0 to 0"),
            ("[checkpoint]\ndir = 3", "checkpoint dir=3: write a path in quotes"),
        ],
    )
    def test_bad_ones_say_what_is_wrong(self, written, text, words):
        with pytest.raises(ConfigError, match=words):
            read_config(written(text, "bad.toml"))

    @pytest.mark.parametrize(
        ("text", "words"), [("{", "cannot read"), ("[1]", "holds a list: write tables"), ("[" * 99999, "cannot read")]
    )
    def test_bad_json(self, written, text, words):
        with pytest.raises(ConfigError, match=words):
            read_config(written(text, "bad.json"))

    def test_a_file_that_is_missing_binary_or_huge(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot read the configuration .*none.toml"):
            read_config(tmp_path / "none.toml")
        (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="cannot read the configuration .*binary.toml"):
            read_config(tmp_path / "binary.toml")
        (tmp_path / "huge.toml").write_bytes(b"#" * ((1 << 20) + 1))
        with pytest.raises(ConfigError, match="larger than 1048576 bytes: that is no configuration"):
            read_config(tmp_path / "huge.toml")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None])
def test_a_count_is_a_whole_number_above_zero(value):
    with pytest.raises(ConfigError, match="keep=.*: write a whole number above 0"):
        check_count("keep", value)


def test_a_number_of_seconds_may_be_broken():
    check_count("save_secs", 0.5, whole=False)


@pytest.mark.parametrize(("name", "value"), [("compile", 1), ("capture", "yes"), ("channels_last", 3)])
def test_switches_are_true_or_false(name, value):
    with pytest.raises(ConfigError, match=f"{name}="):
        SessionConfig(**{name: value})
