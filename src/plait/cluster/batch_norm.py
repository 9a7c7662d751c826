"""Batch normalisation over the batches of all workers, as if one process had them joined."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from plait.errors import ClusterError, ConfigError
from plait.nets.blocks import BatchNorm
from plait.variables.store import variable_name

__all__ = ["synchronise"]


def synchronise(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """From now on, batch normalisation in training takes its statistics over the batches of all workers.

    Returns how many layers that is for: every `nn.BatchNorm1d`, `2d`, `3d` and those of plait's networks. A layer stays
    the same object with the same names and variables; only its class changes, to a subclass. Workers may have batches
    of different sizes. It costs one all-reduce a layer forward, and one backward.

    Call it before the model is sharded. With one worker, and in evaluation, nothing changes.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return 0
    made: dict[type, type] = {}
    found = [(path, module) for path, module in model.named_modules() if _is_ours(path, module)]
    for _, module in found:
        cls = type(module)
        if cls not in made:
            base = _OfPlait if isinstance(module, BatchNorm) else _OfTorch
            # its own type for each group: a group as an attribute of the module could not be copied with it
            named = {"workers": group, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
            made[cls] = type(cls.__name__, (base, cls), named)
        module.__class__ = made[cls]
    return len(found)


def _is_ours(path: str, module: nn.Module) -> bool:
    if not isinstance(module, (_BatchNorm, BatchNorm)):
        return False
    if isinstance(module, (nn.SyncBatchNorm, _OfTorch, _OfPlait)):  # does so already
        return False
    if getattr(module.forward, "__func__", None) not in (_BatchNorm.forward, BatchNorm.forward):
        raise ConfigError(
            f"{variable_name(path)} is a {type(module).__name__} with a forward of its own, which cannot be"
            " synchronised: use nn.BatchNorm itself, or leave sync_batch_norm out"
        )
    return True


class _OfTorch(_BatchNorm):
    """What torch's own layers do in training."""

    workers: ClassVar[dist.ProcessGroup | None]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call] # torch leaves it unannotated
        mean, variance, count = _statistics(input, self.workers)
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = self.momentum
            if share is None:  # the mean over all steps
                share = 1.0 / float(self.num_batches_tracked)
            _follow(self.running_mean, mean, share)
            _follow(self.running_var, _unbiased(variance, count), share)
        return _normalised(input, (mean, variance, count), (self.weight, self.bias), self.eps, self.workers)


class _OfPlait(BatchNorm):
    """What the layers of plait's networks do in training, batch renormalisation included."""

    workers: ClassVar[dist.ProcessGroup | None]

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        mean, variance, count = _statistics(x, self.workers)
        gamma: Tensor | None = self.gamma
        beta: Tensor = self.beta
        if self.renorm:
            r, d = self._renorm(variance, mean)
            gamma, beta = (r, beta + d) if gamma is None else (gamma * r, beta + gamma * d)
        _follow(self.moving_mean, mean, self.momentum)
        _follow(self.moving_variance, variance if self.renorm else _unbiased(variance, count), self.momentum)
        return _normalised(x, (mean, variance, count), (gamma, beta), self.epsilon, self.workers)


@torch.no_grad()
def _follow(moving: Tensor | None, value: Tensor, share: float) -> None:
    if moving is not None:
        moving.mul_(1 - share).add_(value.to(moving.dtype), alpha=share)


def _unbiased(variance: Tensor, count: Tensor) -> Tensor:
    return variance * (count / (count - 1).clamp(min=1))


def _channels(values: Tensor, x: Tensor) -> Tensor:
    """One value a channel, in the shape that goes with `x`."""
    return values.view(-1, *[1] * (x.ndim - 2))


@torch.no_grad()
def _statistics(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel, and the number of values, over all workers.

    Sums of squares would lose digits where a mean is large. So each worker centres its own values and writes its
    moments into a row of its own: added up, the rows are all workers' moments, to the bit, in any order of addition.
    """
    channels, own = x.shape[1], x.numel() // max(1, x.shape[1])
    wide = torch.promote_types(x.dtype, torch.float32)
    table = torch.zeros(dist.get_world_size(group), 2 * channels + 1, dtype=wide, device=x.device)
    if own:
        row, dims = table[dist.get_rank(group)], [0, *range(2, x.ndim)]
        mean = x.sum(dims, dtype=wide) / own
        centred = x - _channels(mean, x)
        row[:channels], row[channels:-1], row[-1] = mean, centred.mul_(centred).sum(dims), own
    _all_reduce(table, group)
    means, squares, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
    count = counts.sum(0).clamp_(min=1)
    mean = (means * counts).sum(0) / count
    variance = (squares + (means - mean).square_().mul_(counts)).sum(0) / count
    return mean, variance, count


def _normalised(
    x: Tensor,
    statistics: tuple[Tensor, Tensor, Tensor],
    affine: tuple[Tensor | None, Tensor | None],
    epsilon: float,
    group: dist.ProcessGroup | None,
) -> Tensor:
    mean = statistics[0]
    weight = torch.ones_like(mean) if affine[0] is None else affine[0].to(mean.dtype)
    bias = torch.zeros_like(mean) if affine[1] is None else affine[1].to(mean.dtype)
    result: Tensor = _Normalise.apply(x, weight, bias, *statistics, epsilon, group)  # type: ignore[no-untyped-call] # torch's
    return result


class _Normalise(torch.autograd.Function):
    """Normalisation by statistics that depend on the input: the gradient needs two sums over all workers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        epsilon: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, (variance + epsilon).rsqrt(), count)
        ctx.epsilon, ctx.group = epsilon, group
        if not x.numel():
            return x.clone()
        return functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        of_weight, of_bias = torch.zeros_like(mean), torch.zeros_like(mean)
        if x.numel():
            reduce = torch.ops.aten.native_batch_norm_backward  # given the joined statistics, it sums over this batch
            _, of_weight, of_bias = reduce(
                gradient, x, weight, None, None, mean, inverse, True, ctx.epsilon, [False, True, True]
            )
        if not ctx.needs_input_grad[0]:
            return None, of_weight, of_bias, None, None, None, None, None
        flat = torch.cat([of_weight, of_bias])
        _all_reduce(flat, ctx.group)
        all_weight, all_bias = flat.div_(count).chunk(2)
        scale = weight * inverse
        of_x = x - _channels(mean, x)
        of_x.mul_(_channels(-scale * inverse * all_weight, x)).sub_(_channels(scale * all_bias, x))
        of_x.addcmul_(gradient, _channels(scale, x))
        return of_x.to(x.dtype), of_weight, of_bias, None, None, None, None, None


def _all_reduce(flat: Tensor, group: dist.ProcessGroup | None) -> None:
    try:
        dist.all_reduce(flat, group=group)
    except RuntimeError as error:
        rank, others = dist.get_rank(group), dist.get_world_size(group) - 1
        raise ClusterError(
            f"worker {rank} waited in batch normalisation for the other {others}, and one is lost or does another"
            f" step: {error}"
        ) from error
