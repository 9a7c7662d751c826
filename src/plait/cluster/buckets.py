"""The mean of tensors over workers anywhere, in flat buckets, through `torch.distributed`.

Gradients may start on their way while the backward pass still makes others. Which list will be asked for next is
foreseen from what was asked for before, the same on every worker. When that was wrong, or a gradient has changed after
it was sent, all workers know it, and send everything again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from plait.cluster.exchange import Mesh
from plait.errors import ClusterError

__all__ = ["BUCKET_BYTES", "Buckets"]

BUCKET_BYTES = 25 << 20
"""A bucket is closed when it has so many bytes: large enough for the network, small enough to start early."""
FORESEEN = 4
"""So many times in a row the next list must have been foreseen rightly, before gradients are sent on that belief."""

Values = Sequence[Tensor | None]


class _Bucket(NamedTuple):
    """Neighbours of one dtype on one device."""

    places: list[int]
    flat: Tensor
    views: list[Tensor]
    """The parts of `flat`, in the tensors' shapes and layouts."""


class Buckets:
    """Makes means of lists of tensors over a process group."""

    def __init__(self, mesh: Mesh, group: Any, *, compression: str | None = None, overlap: bool = True) -> None:
        self.mesh = mesh
        self._group = group
        self._dtype = torch.bfloat16 if compression == "bf16" else None
        self._overlap = overlap
        self._after: dict[Plan | None, Plan] = {}
        self._last: Plan | None = None
        self._right, self._needed = 0, FORESEEN
        self._hooked: set[Tensor] = set()
        self.foreseen: Plan | None = None
        """Whose gradients may be sent as soon as they are there."""

    def plan(self, likes: Sequence[Tensor]) -> Plan:
        """What makes the mean of tensors that are like these."""
        return Plan(self, likes, self._dtype)

    def watch(self, plan: Plan, parameters: Sequence[Tensor]) -> None:
        """Send these parameters' gradients early, when `plan` is foreseen."""
        if not self._overlap:
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf and parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call] # torch's
        plan.parameters = {parameter: place for place, parameter in enumerate(parameters)}

    def _arrived(self, parameter: Tensor) -> None:
        plan = self.foreseen
        if plan is not None and parameter in plan.parameters:
            plan.arrived(plan.parameters[parameter], parameter.grad)

    def asked(self, plan: Plan) -> None:
        """Take note of who was asked, and foresee the next."""
        self._right = self._right + 1 if self._after.get(self._last) is plan else 0
        self._after[self._last] = plan
        self._last = plan
        following = self._after.get(plan)
        trusted = self._right >= self._needed and following is not None and following.parameters
        self.foreseen = following if trusted else None

    def distrust(self) -> None:
        """Gradients changed after they were sent, and may again: be slower to believe."""
        self._right, self._needed = 0, 2 * self._needed

    def start(self, flat: Tensor) -> Any:
        return self._translated(lambda: dist.all_reduce(flat, group=self._group, async_op=True))

    def wait(self, work: Any) -> None:
        self._translated(work.wait)

    def _translated(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except RuntimeError as error:
            mesh = self.mesh
            text = (
                f"worker {mesh.rank} waited in 'mean' for the other {mesh.size - 1}, at most {mesh.timeout:g} s, and"
                f" one is lost, stuck or too slow: {error}"
            )
            mesh.close(text)
            raise ClusterError(text) from error


class Plan:
    """The buckets of one list of tensors, and what of them is under way."""

    def __init__(self, owner: Buckets, likes: Sequence[Tensor], dtype: torch.dtype | None) -> None:
        self._owner = owner
        self._buckets = list(_buckets(likes, dtype))
        self._bucket_of = {place: number for number, one in enumerate(self._buckets) for place in one.places}
        self.parameters: dict[Tensor, int] = {}
        self._forget()

    def _forget(self) -> None:
        self._here: dict[int, Tensor] = {}
        """Gradients that have come, by place."""
        self._lacking = [len(bucket.places) for bucket in self._buckets]
        self._works: list[Any] = []
        self._sent: dict[int, tuple[int, int] | None] = {}
        """Which version of what was sent early."""

    def arrived(self, place: int, gradient: Tensor | None) -> None:
        """A gradient is there, in the middle of the backward pass: send what is complete, in the order of buckets."""
        if gradient is None or gradient.is_sparse or place in self._here:
            return  # one that comes twice is found out when its version is looked at
        self._here[place] = gradient
        self._lacking[self._bucket_of[place]] -= 1
        while len(self._works) < len(self._buckets) and not self._lacking[len(self._works)]:
            bucket = self._buckets[len(self._works)]
            self._send(self._here.get)
            self._sent.update({sent: _version(self._here[sent]) for sent in bucket.places})

    @torch.no_grad()
    def _send(self, value_of: Callable[[int], Tensor | None]) -> None:
        """The next bucket goes on its way; what is not here counts as zeros."""
        bucket = self._buckets[len(self._works)]
        for place, view in zip(bucket.places, bucket.views, strict=True):
            value = value_of(place)
            if value is None:
                view.zero_()
            else:
                view.copy_(value)
        self._works.append(self._owner.start(bucket.flat))

    def __call__(self, values: Values) -> dict[int, Tensor]:
        """Overwrite each value by the mean; returns new tensors for those that only others have."""
        foreseen = self._owner.foreseen
        self._owner.foreseen = None
        if foreseen is not None and foreseen is not self:
            foreseen.discard()
        gone, changed = self._round(values)
        if changed:
            self._owner.distrust()
            self._forget()
            gone, _ = self._round(values)
        made = self._results(values, gone)
        self._forget()
        self._owner.asked(self)
        return made

    def discard(self) -> None:
        """Bring to an end what some worker may have begun; nobody uses it."""
        self._send_rest(lambda _: None)
        for work in self._works:
            self._owner.wait(work)
        self._forget()

    def _round(self, values: Values) -> tuple[set[int], bool]:
        """Send the rest and wait for all; who is missing everywhere, and whether somebody's values have changed."""
        changed = any(_version(values[place]) != sent for place, sent in self._sent.items())
        self._send_rest(values.__getitem__)
        gone = [place for place, value in enumerate(values) if value is None]
        answers = self._owner.mesh.exchange("mean", struct.pack(f"<?{len(gone)}I", changed, *gone))
        for work in self._works:
            self._owner.wait(work)
        sets = [set(struct.unpack(f"<{(len(one) - 1) // 4}I", one[1:])) for one in answers]
        return sets[0].intersection(*sets[1:]), any(one[0] for one in answers)

    def _send_rest(self, value_of: Callable[[int], Tensor | None]) -> None:
        while len(self._works) < len(self._buckets):
            self._send(value_of)

    @torch.no_grad()
    def _results(self, values: Values, nowhere: set[int]) -> dict[int, Tensor]:
        made: dict[int, Tensor] = {}
        share = self._owner.mesh.size
        for bucket in self._buckets:
            for place, view in zip(bucket.places, bucket.views, strict=True):
                value = values[place]
                if value is not None:
                    value.copy_(view).div_(share)
                elif place not in nowhere:
                    made[place] = view.clone().div_(share)
        return made


def _version(value: Tensor | None) -> tuple[int, int] | None:
    """What is another when the tensor is another, or has been written to."""
    return None if value is None else (id(value), value._version)  # noqa: SLF001 - torch has no other name for it


def _buckets(likes: Sequence[Tensor], dtype: torch.dtype | None) -> list[_Bucket]:
    """From the last tensor to the first: that is about the order in which gradients come."""
    places: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for place in reversed(range(len(likes))):
        like = likes[place]
        key = (dtype or like.dtype if like.is_floating_point() else like.dtype, like.device)
        size = like.numel() * key[0].itemsize
        groups = places.setdefault(key, [[]])
        if groups[-1] and sizes[key] + size > BUCKET_BYTES:
            groups.append([])
        sizes[key] = size + (sizes[key] if groups[-1] else 0)
        groups[-1].append(place)
    # one that ends with a late place is complete late
    made = [_bucket(key, group, likes) for key, groups in places.items() for group in groups]
    return sorted(made, key=lambda bucket: -bucket.places[-1])


def _bucket(key: tuple[torch.dtype, torch.device], places: list[int], likes: Sequence[Tensor]) -> _Bucket:
    flat = torch.zeros(sum(likes[place].numel() for place in places), dtype=key[0], device=key[1])
    views, start = [], 0
    for place in places:
        like = likes[place]
        strides = torch.empty_like(like, device="meta").stride()
        views.append(flat[start : start + like.numel()].as_strided(like.shape, strides))
        start += like.numel()
    return _Bucket(places, flat, views)
