"""Wide and deep over all columns of the census, as an Estimator with a `model_fn` of one's own.

    python examples/train/wide_and_deep/alone.py
    plait launch --workers 2 --servers 1 examples/train/wide_and_deep/alone.py --batch 256

The second line is the same training: two workers with half of each batch, and a server that has the variables.
"""

from __future__ import annotations

import time

import common
from torch.nn import functional

import plait
from plait import train


def model_fn(features, labels, mode, params):
    logit = common.logit_of(*(common.part_of(party, params["data"], features) for party in common.PARTIES))
    if mode == train.ModeKeys.PREDICT:
        return train.EstimatorSpec(mode, predictions={"probability": logit.sigmoid()})
    loss = functional.binary_cross_entropy_with_logits(logit, labels)
    metrics = {"auc": plait.metrics.auc(labels, logit, exact=True)} if mode == train.ModeKeys.EVAL else None
    optimizers = common.optimizers(*common.PARTIES, "top")
    return train.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics, train_op=optimizers)


def input_fn(args, part):
    x = {name: column for party in common.PARTIES for name, column in common.features(party, args, part).items()}
    training = part == "train"
    return train.numpy_input_fn(
        x,
        common.income(args, part),
        args.batch if training else common.BATCH,
        args.epochs if training else 1,
        shuffle=training,
        seed=args.seed,
        drop_remainder=training,
    )


def main():
    args = common.arguments(__doc__.partition("\n")[0])
    rows = len(common.income(args, "train"))
    config = train.RunConfig(tf_random_seed=args.seed, save_checkpoints_steps=rows // common.BATCH)
    estimator = train.Estimator(model_fn, args.model_dir, config, {"data": args.data})
    began = time.perf_counter()
    train.train_and_evaluate(
        estimator,
        train.TrainSpec(input_fn(args, "train"), max_steps=rows // common.BATCH * args.epochs),
        train.EvalSpec(input_fn(args, "test"), steps=None, throttle_secs=0),
    )
    if estimator.model.strategy.worker_id == 0:
        for number, found in enumerate(estimator.model.history, start=1):
            print(f"pass {number}: test auc {found['metrics']['auc']:.4f}")
        print(f"wide and deep, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
