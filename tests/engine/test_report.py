from __future__ import annotations

import functools
import io
import logging
import math

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.efl import MODE
from plait.engine import report
from plait.engine.report import LoggerHook, check_finite, final_table, log, log_line, scope_label, show_log
from plait.errors import NanLossError

SETTER = efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1))


def small(scale=lambda step: 1.0, task=None):
    model = efl.Model()

    def loss_fn(model, sample):
        value = plait.layer("fc", nn.Linear, 2, 1)(sample.x).mean()
        return value * scale(int(model.global_step)) if model.compiled else value

    model.input_fn(lambda model, mode: [{"x": torch.ones(2, 2)}] * 5, task=task)
    model.loss_fn(loss_fn, task=task).optimizer_fn(SETTER, task=task)
    model.eval_fn(lambda model, sample: model.add_metric("ones", sample.x.mean()), task=task)
    return model.compile()


def test_the_line_is_that_of_the_document():
    expected = "step: 10(global step: 10)\tsample/sec: 42.087\tloss: 3.451"
    assert log_line(10, 10, 42.0868, {"loss": 3.4512}) == expected


def test_metrics_follow_in_their_order():
    assert (
        log_line(0, 5, 1, {"b": 1, "a": 2}, "[x] ")
        == "[x] step: 0(global step: 5)\tsample/sec: 1.000\tb: 1.000\ta: 2.000"
    )


@pytest.mark.parametrize(
    ("scope", "label"),
    [
        (efl.TaskScope(MODE.TRAIN), ""),
        (efl.TaskScope(MODE.EVAL), "[eval] "),
        (efl.TaskScope(MODE.TRAIN, "click"), "[click] "),
        (efl.TaskScope(MODE.EVAL, "click"), "[click eval] "),
    ],
)
def test_what_is_not_plain_training_is_marked(scope, label):
    assert scope_label(scope) == label


def test_a_loss_that_is_no_number_is_named_with_task_and_step():
    model = small(lambda step: math.nan if step == 2 else 1.0, task="click")
    with pytest.raises(NanLossError, match=r"the loss of TRAIN of task 'click' is nan at global step 3: lower the"):
        model.fit(efl.procedure_fn.train(3), log_step=100)


def test_an_infinite_loss_is_no_number_either():
    with pytest.raises(NanLossError, match="is inf at global step 1"):
        small(lambda step: math.inf).fit(efl.procedure_fn.train(), log_step=1)


def test_a_model_that_has_not_trained_has_no_bad_loss():
    check_finite(small())


def test_the_logger_stops_at_the_first_line_after_it():
    model = small(lambda step: math.nan if step >= 1 else 1.0)
    with pytest.raises(NanLossError):
        model.fit(efl.procedure_fn.train(), log_step=2)
    assert int(model.global_step) == 3


def test_the_logger_goes_on_counting_after_a_restart():
    model = small()
    hook = LoggerHook(model, efl.TaskScope(MODE.TRAIN), 10)
    for _ in range(3):
        hook.after_run(None, None)
    fresh = LoggerHook(model, efl.TaskScope(MODE.TRAIN), 10)
    fresh.load_state_dict(hook.state_dict())
    assert fresh.state_dict() == hook.state_dict() == {"step": 3, "next": 10}


def test_the_rate_counts_rows_since_the_last_line(monkeypatch, caplog):
    model, now = small(), [0.0]
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    hook = LoggerHook(model, efl.TaskScope(MODE.TRAIN), 2)
    model._now.sample = plait.efl.Sample({"x": torch.ones(8, 1)})
    with caplog.at_level(logging.INFO, "plait"):
        for _ in range(3):
            now[0] += 0.5
            hook.after_run(None, None)
    assert [line.split("sample/sec: ")[1].split("\t")[0] for line in caplog.messages] == ["16.000", "16.000"]
    hook.restart_clock()
    assert hook._since == 3


def test_nothing_is_formatted_when_nobody_reads_it(monkeypatch):
    model = small()
    log.setLevel(logging.WARNING)
    monkeypatch.setattr(report, "log_line", lambda *args: pytest.fail("a line was made"))
    LoggerHook(model, efl.TaskScope(MODE.TRAIN), 1).after_run(None, None)


def test_the_final_table_has_a_row_for_each_task_and_mode():
    model = small(task="click")
    model.fit(efl.procedure_fn.train_and_eval(max_iter=1))
    table = final_table(model, 1.25)
    assert "5 steps in 1.2 s" in table or "5 steps in 1.3 s" in table
    assert any("click" in line and "train" in line and "loss" in line for line in table.splitlines())
    assert any("click" in line and "eval" in line and "ones 1.0000" in line for line in table.splitlines())


def test_the_log_goes_to_stderr_once_unless_the_program_has_set_it_up(monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    show_log()
    show_log()
    log.info("hello")
    assert stream.getvalue() == "INFO:plait:hello\n"


def test_a_program_that_has_set_logging_up_is_left_alone(monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    before = list(log.handlers)
    show_log()
    assert log.handlers == before


def test_in_a_terminal_there_is_progress_and_it_ends(monkeypatch):
    monkeypatch.setattr("plait.engine.fit.in_terminal", lambda: True)
    model = small()
    model.fit(efl.procedure_fn.train())
    assert int(model.global_step) == 5
