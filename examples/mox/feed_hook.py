"""A placeholder in the model_fn, and the hook that feeds it."""

from __future__ import annotations

import torch

from plait import mox, train


def input_fn(mode, **kwargs):
    return torch.utils.data.TensorDataset(torch.zeros(10))


def model_fn(inputs, run_mode, **kwargs):
    del inputs
    x = mox.placeholder(dtype=torch.float32, shape=())

    class FeedRunHook(mox.AggregativeSessionRunHook):
        def before_run(self, run_context):  # noqa: ARG002 - a hook's signature
            feed_x = 1.0
            return train.SessionRunArgs(fetches=None, feed_dict={x: feed_x})

        def support_aggregation(self):
            return False

        def support_sync_workers(self):
            return False

        def run_inter_mode(self):
            return False

    return mox.ModelSpec(log_info={"x": x}, output_info={"x": x}, hooks=[FeedRunHook()])


def main():
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        output_fn=print,
        output_every_n_steps=2,
        batch_size=1,
        run_mode=mox.ModeKeys.EVAL,
        max_number_of_steps=4,
    )


if __name__ == "__main__":
    main()
