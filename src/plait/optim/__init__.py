"""Optimizers: which one moves which variables, by which rule, and at which rate."""

from plait.optim.assign import Factory, optimizer_setter, scope_optimizer
from plait.optim.factories import get_optimizer_fn
from plait.optim.rules import Adam, Ftrl, RMSProp
from plait.optim.schedules import Schedule, linear_cosine_decay, piecewise_lr, polynomial_decay, warmup
from plait.optim.wrappers import get_optimizer_wrapper_fn

__all__ = [
    "Adam",
    "Factory",
    "Ftrl",
    "RMSProp",
    "Schedule",
    "get_optimizer_fn",
    "get_optimizer_wrapper_fn",
    "linear_cosine_decay",
    "optimizer_setter",
    "piecewise_lr",
    "polynomial_decay",
    "scope_optimizer",
    "warmup",
]
