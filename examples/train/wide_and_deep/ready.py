"""Wide and deep over all columns of the census, with the ready Estimator.

python examples/train/wide_and_deep/ready.py
"""

from __future__ import annotations

import alone
import common

from plait import train


def main():
    args = common.arguments(__doc__.partition("\n")[0])
    both = [common.columns(party, args.data) for party in common.PARTIES]
    estimator = train.DNNLinearCombinedClassifier(
        args.model_dir,
        linear_feature_columns=[column for wide, _ in both for column in wide],
        linear_optimizer=train.FtrlOptimizer(0.02, l1_regularization_strength=0.001),
        dnn_feature_columns=[column for _, deep in both for column in deep],
        dnn_optimizer=train.AdagradOptimizer(0.02, initial_accumulator_value=1e-6),
        dnn_hidden_units=[128, 64],
        config=train.RunConfig(tf_random_seed=args.seed),
        loss_reduction=train.Reduction.MEAN,
    )
    estimator.train(alone.input_fn(args, "train"))
    found = estimator.evaluate(alone.input_fn(args, "test"))
    print(
        f"test auc {found['auc']:.4f}, accuracy {found['accuracy']:.4f} ({found['accuracy_baseline']:.4f} says nobody)"
    )


if __name__ == "__main__":
    main()
