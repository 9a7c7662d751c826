"""A script for several processes: trains an Estimator, evaluates and predicts, and prints what it found."""

from __future__ import annotations

import sys

import numpy as np
from torch import nn

import plait
from plait import train

BATCH, MODEL_DIR, CRASH_AT = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
X = np.random.default_rng(0).normal(size=(512, 3)).astype(np.float32)


class Crash(train.SessionRunHook):
    def after_run(self, run_context, run_values):
        if run_context.session.global_step.value == CRASH_AT:
            raise RuntimeError("somebody pulled the plug")


def model_fn(features, labels, mode):
    found = plait.layer("output", nn.Linear, 3, 1)(features["x"]).squeeze(1)
    if mode == train.ModeKeys.PREDICT:
        return train.EstimatorSpec(mode, predictions=found)
    loss = (found - labels).square().mean()
    metrics = {"rmse": plait.metrics.rmse(labels, found)} if mode == train.ModeKeys.EVAL else None
    return train.EstimatorSpec(
        mode, loss=loss, eval_metric_ops=metrics, train_op=train.AdagradOptimizer(0.05).minimize(loss)
    )


def main():
    read = train.numpy_input_fn({"x": X}, X.sum(1), BATCH, None, shuffle=True)
    test = train.numpy_input_fn({"x": X}, X.sum(1), 64, shuffle=False)
    config = train.RunConfig(save_checkpoints_steps=10, save_summary_steps=None)
    estimator = train.Estimator(model_fn, MODEL_DIR, config)
    train_spec = train.TrainSpec(read, 30, [Crash()])
    found, _ = train.train_and_evaluate(estimator, train_spec, train.EvalSpec(test, None, throttle_secs=0))
    estimator.train(read, steps=5)
    again = estimator.evaluate(test)
    count = len(list(estimator.predict(test)))
    if estimator.model.strategy.worker_id == 0:
        print(f"found {found['rmse']:.6f} {again['rmse']:.6f} {again['global_step']} {count}")


if __name__ == "__main__":
    main()
