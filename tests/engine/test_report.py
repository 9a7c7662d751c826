from __future__ import annotations

import functools
import io
import logging
import math
import re

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
    with pytest.raises(
        NanLossError, match=r"the loss of TRAIN of task 'click' is nan, noticed at global step 3 .*: lower the"
    ):
        model.fit(efl.procedure_fn.train(3), log_step=100)


def test_an_infinite_loss_is_no_number_either():
    with pytest.raises(NanLossError, match="is inf, noticed at global step 1 "):
        small(lambda step: math.inf).fit(efl.procedure_fn.train(), log_step=1)


def test_the_real_loss_is_looked_at_whatever_metric_has_its_name():
    model = efl.Model()

    def loss_fn(model, sample):
        model.add_metric("loss", efl.metrics.mean(sample.x))
        value = plait.layer("fc", nn.Linear, 2, 1)(sample.x).mean()
        return value * math.nan if model.compiled else value

    model.input_fn(lambda model, mode: [{"x": torch.ones(2, 2)}] * 5).loss_fn(loss_fn).optimizer_fn(SETTER).compile()
    with pytest.raises(NanLossError, match="the loss of TRAIN is nan, noticed at global step 1 "):
        model.fit(efl.procedure_fn.train(5), log_step=100)
    assert model.metric_values(MODE.TRAIN)["loss"] == 1.0


def test_a_metric_called_loss_that_is_no_number_is_not_the_loss():
    model = efl.Model()

    def loss_fn(model, sample):
        model.add_metric("loss", efl.metrics.mean(sample.x * math.nan))
        return plait.layer("fc", nn.Linear, 2, 1)(sample.x).mean()

    model.input_fn(lambda model, mode: [{"x": torch.ones(2, 2)}] * 5).loss_fn(loss_fn).optimizer_fn(SETTER).compile()
    model.fit(efl.procedure_fn.train(), log_step=1)
    assert int(model.global_step) == 5


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


def rate_after(hook, now, caplog, seconds):
    """The rate on the line of a step that took so long."""
    now[0] += seconds
    with caplog.at_level(logging.INFO, "plait"):
        hook.after_run(None, None)
    return float(caplog.messages[-1].split("sample/sec: ")[1].split("\t")[0])


@pytest.mark.parametrize(
    ("scope", "rate"),
    [
        (efl.TaskScope(MODE.EVAL, "click"), 4.0),
        (efl.TaskScope(MODE.TRAIN, "buy"), 4.0),
        (efl.TaskScope(MODE.TRAIN, "click"), 0.4),
        (efl.TaskScope(MODE.TRAIN), 0.4),
        (None, 0.4),
    ],
    ids=["another mode", "another task", "its own", "all tasks together", "a stage that may run anything"],
)
def test_the_clock_of_a_rate_runs_only_in_stages_of_its_task_and_mode(monkeypatch, caplog, scope, rate):
    model, now = small(task="click"), [0.0]
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    model._now.sample = plait.efl.Sample({"x": torch.ones(4, 1)})
    own = efl.TaskScope(MODE.TRAIN, "click")
    hook = LoggerHook(model, own, 1)
    hook.stage_begins(scope)
    now[0] += 9.0
    hook.stage_begins(own)
    assert rate_after(hook, now, caplog, 1.0) == pytest.approx(rate)


def test_after_a_restart_the_rate_leaves_out_what_another_process_did(monkeypatch, caplog):
    model, now = small(), [0.0]
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    model._now.sample = plait.efl.Sample({"x": torch.ones(4, 1)})
    hook = LoggerHook(model, efl.TaskScope(MODE.TRAIN), 10)
    now[0] = 5.0
    hook.load_state_dict({"step": 100, "next": 100})
    assert rate_after(hook, now, caplog, 2.0) == pytest.approx(2.0)


def test_nothing_is_formatted_when_nobody_reads_it(monkeypatch):
    model = small()
    log.setLevel(logging.WARNING)
    monkeypatch.setattr(report, "log_line", lambda *args: pytest.fail("a line was made"))
    LoggerHook(model, efl.TaskScope(MODE.TRAIN), 1).after_run(None, None)


def test_the_final_table_has_a_row_for_each_task_and_mode():
    model = small(task="click")
    model.fit(efl.procedure_fn.train_and_eval(max_iter=1))
    table = final_table(model, 3, 1.25)
    assert re.search(r"global step 5: 3 steps in 1\.[23] s", table)
    assert any("click" in line and "train" in line and "loss" in line for line in table.splitlines())
    assert any("click" in line and "eval" in line and "ones 1.0000" in line for line in table.splitlines())


def test_the_final_table_leaves_out_what_is_no_number():
    model = small()
    model.fit(efl.procedure_fn.train())
    (row,) = [line for line in final_table(model, 5, 1.0).splitlines() if "eval" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["-", "eval", "-"]
    assert "nan" not in final_table(model, 5, 1.0)


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


@pytest.mark.parametrize(("before", "after"), [(logging.NOTSET, logging.INFO), (logging.ERROR, logging.ERROR)])
def test_a_program_with_handlers_of_its_own_sees_the_log_unless_it_chose_a_level(monkeypatch, before, after):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    log.setLevel(before)
    show_log()
    assert log.level == after


def test_workers_whose_lines_would_repeat_the_chiefs_warn_only(monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    log.setLevel(logging.NOTSET)
    show_log(quiet=True)
    assert log.level == logging.WARNING


@pytest.mark.parametrize(("in_step", "times"), [(True, 3), (False, 1)])
def test_workers_in_step_show_the_rate_of_all(monkeypatch, caplog, in_step, times):
    caplog.set_level(logging.INFO, "plait")
    model = small()
    monkeypatch.setattr(model.strategy, "in_step", in_step, raising=False)
    monkeypatch.setattr(model.strategy, "worker_num", 3, raising=False)
    seconds = iter([10.0, 14.0])
    monkeypatch.setattr("plait.engine.report.time.perf_counter", lambda: next(seconds))
    hook = LoggerHook(model, efl.TaskScope(MODE.TRAIN), 1)
    hook.after_run(None, None)
    assert f"sample/sec: {times / 4:.3f}" in caplog.text


def test_in_a_terminal_there_is_progress_and_it_ends(monkeypatch):
    monkeypatch.setattr("plait.engine.fit.in_terminal", lambda: True)
    model = small()
    model.fit(efl.procedure_fn.train())
    assert int(model.global_step) == 5
