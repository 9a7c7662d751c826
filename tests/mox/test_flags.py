from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from plait import mox
from plait.errors import ConfigError
from plait.mox.flags import FLAGS, _warn_of_slip, reset_flags


@pytest.fixture
def argv(monkeypatch):
    def give(*arguments):
        monkeypatch.setattr(sys, "argv", ["script.py", *arguments])

    return give


DEFAULTS = {
    "capture_steps": False,
    "checkpoint_exclude_patterns": "",
    "checkpoint_include_patterns": "",
    "compile_modules": False,
    "device": "auto",
    "gradient_clip": None,
    "gradient_clip_type": "norm",
    "job_name": "worker",
    "log_first_clone": True,
    "loss_scale": 1.0,
    "num_gpus": 1,
    "precision": "fp32",
    "ps_hosts": "",
    "sync_replicas": True,
    "task_index": 0,
    "trainable_exclude_patterns": "",
    "trainable_include_patterns": "",
    "use_fp16": False,
    "worker_hosts": "",
}


def test_the_flags_and_their_defaults_are_these():
    assert {name: mox.get_flag(name) for name in FLAGS} == DEFAULTS


def test_the_help_names_every_flag_with_its_default_and_meaning():
    lines = mox.get_help().splitlines()
    assert [line.split()[0] for line in lines] == [f"--{name}" for name in FLAGS]
    assert "the loss is multiplied by it, gradients are divided by it (default: 1.0)" in mox.get_help()


def test_the_documents_spelling_of_the_name():
    assert mox.get_flag(flag_name="worker_hosts") == ""
    assert mox.get_flag(name="num_gpus") == 1


def test_reset_forgets_what_was_set():
    mox.set_flag("num_gpus", 3)
    reset_flags()
    assert mox.get_flag("num_gpus") == 1


@pytest.mark.parametrize(
    ("argument", "meant"), [("--num_gpu=2", "num_gpus"), ("--gradient_clp", "gradient_clip"), ("--task_idx", None)]
)
def test_a_near_miss_on_the_command_line_is_warned_about_once(argv, caplog, argument, meant):
    _warn_of_slip.cache_clear()
    argv(argument, "3")
    assert (mox.get_flag("num_gpus"), mox.get_flag("gradient_clip")) == (1, None)
    name = argument.removeprefix("--").split("=")[0]
    expected = [f"--{name} is not a flag; --{meant} is: was that meant?"] if meant else []
    assert caplog.messages == expected


class TestSet:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("checkpoint_exclude_patterns", "logits"),
            ("num_gpus", 2),
            ("use_fp16", True),
            ("loss_scale", 1024),
            ("gradient_clip", 0.5),
            ("gradient_clip", 1),
            ("gradient_clip", None),
        ],
    )
    def test_what_was_set_is_got(self, name, value):
        mox.set_flag(name, value)
        assert mox.get_flag(name) == value

    def test_a_whole_number_for_a_float_becomes_one(self):
        mox.set_flag("loss_scale", 2)
        assert isinstance(mox.get_flag("loss_scale"), float)

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("num_gpus", "2", r"flag num_gpus='2': write an int \(replicas in this process\)"),
            ("num_gpus", 1.0, "flag num_gpus=1.0: write an int"),
            ("num_gpus", True, "flag num_gpus=True: write an int"),
            ("num_gpus", None, "flag num_gpus=None: write an int"),
            ("use_fp16", 1, "flag use_fp16=1: write a bool"),
            ("loss_scale", "2", "flag loss_scale='2': write a float"),
            ("loss_scale", True, "flag loss_scale=True: write a float"),
            ("worker_hosts", ["a"], r"flag worker_hosts=\['a'\]: write a str"),
            ("gradient_clip", "1", "flag gradient_clip='1': write a float"),
        ],
    )
    def test_a_wrong_type_is_refused(self, name, value, words):
        with pytest.raises(ConfigError, match=words):
            mox.set_flag(name, value)
        assert mox.get_flag(name) == DEFAULTS[name]

    def test_an_unknown_name_is_answered_with_the_known_ones(self):
        for call in (lambda: mox.get_flag("gpus"), lambda: mox.set_flag("gpus", 1)):
            with pytest.raises(ConfigError, match="there is no flag 'gpus': the flags are .*num_gpus.*worker_hosts"):
                call()
        with pytest.raises(ConfigError, match="there is no flag None"):
            mox.get_flag()


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "name", "value"),
        [
            (["--num_gpus=1"], "num_gpus", 1),
            (["--loss_scale", "2"], "loss_scale", 2.0),
            (["--gradient_clip", "-1"], "gradient_clip", -1.0),
            (["--use_fp16=true"], "use_fp16", True),
            (["--use_fp16", "False"], "use_fp16", False),
            (["--use_fp16"], "use_fp16", True),
            (["--use_fp16", "data.csv"], "use_fp16", True),
            (["--use_fp16", "--loss_scale=2"], "use_fp16", True),
            (["--sync_replicas=no"], "sync_replicas", False),
            (["--worker_hosts=a:1,b:2"], "worker_hosts", "a:1,b:2"),
            (["--worker_hosts="], "worker_hosts", ""),
            (["--checkpoint_exclude_patterns=a=b"], "checkpoint_exclude_patterns", "a=b"),
            (["train", "--lr", "0.1", "--task_index", "3", "out"], "task_index", 3),
            (["--task_index=1", "--task_index=2"], "task_index", 2),
            (["--", "--num_gpus=4"], "num_gpus", 1),
            (["--num_gpu=4"], "num_gpus", 1),
            (["num_gpus=4"], "num_gpus", 1),
        ],
    )
    def test_flags_are_found_among_the_scripts_arguments(self, argv, arguments, name, value):
        argv(*arguments)
        assert mox.get_flag(name) == value
        assert type(mox.get_flag(name)) is type(value)
        assert sys.argv == ["script.py", *arguments]

    @pytest.mark.parametrize(
        ("argument", "words"),
        [
            ("--num_gpus=two", r"--num_gpus=two: .*\(replicas in this process\)"),
            ("--num_gpus", "--num_gpus=: "),
            ("--loss_scale=much", "--loss_scale=much: could not convert"),
            ("--use_fp16=maybe", "--use_fp16=maybe: write true or false"),
            ("--gradient_clip=none", "--gradient_clip=none: could not convert"),
        ],
    )
    def test_a_text_that_does_not_fit_is_refused(self, argv, argument, words):
        argv(argument)
        with pytest.raises(ConfigError, match=words):
            mox.get_flag("num_gpus")

    def test_what_the_program_sets_wins(self, argv):
        argv("--num_gpus=4")
        mox.set_flag("num_gpus", 2)
        assert mox.get_flag("num_gpus") == 2

    def test_the_scripts_own_parser_is_unaffected(self, argv):
        argv("--lr", "0.5", "--num_gpus=1", "data.csv")
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        parser.add_argument("path")
        own, rest = parser.parse_known_args()
        assert (own.lr, own.path, rest) == (0.5, "data.csv", ["--num_gpus=1"])
        assert mox.get_flag("num_gpus") == 1

    def test_in_a_script_of_its_own(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "import argparse, sys\n"
            "from plait import mox\n"
            "parser = argparse.ArgumentParser()\n"
            "parser.add_argument('--epochs', type=int)\n"
            "own, _ = parser.parse_known_args()\n"
            "print(own.epochs, mox.get_flag('loss_scale'), mox.get_flag('use_fp16'), len(sys.argv))\n"
        )
        command = [sys.executable, script, "--epochs", "3", "--loss_scale", "2", "--use_fp16"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "3 2.0 True 6\n"
