"""The follower of wide and deep: an employment office, with columns of its own and no labels."""

from __future__ import annotations

import functools

import common
import leader

from plait import efl


def loss_fn(args, model, sample):
    model.send("part", common.part_of("follower", args.data, dict(sample.items())), require_grad=True)


def eval_fn(args, model, sample):
    model.send("part", common.part_of("follower", args.data, dict(sample.items())))


def main():
    args = common.arguments(__doc__.partition("\n")[0])
    model = efl.FederalModel(seed=args.seed, sample_id="id")
    model.input_fn(functools.partial(leader.input_fn, args, "follower"))
    model.loss_fn(functools.partial(loss_fn, args))
    model.eval_fn(functools.partial(eval_fn, args))
    model.optimizer_fn(efl.optimizer_fn.scope_optimizer(common.optimizers("follower")))
    model.compile()
    where = f"{args.model_dir}/follower" if args.model_dir else None
    model.fit(efl.procedure_fn.train_and_eval(max_iter=args.epochs), project_name="census", checkpoint_dir=where)


if __name__ == "__main__":
    main()
