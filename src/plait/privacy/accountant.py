"""What noised releases tell of one row: their epsilon; and the noise, or the steps, that an epsilon allows."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from plait.errors import ConfigError

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

__all__ = [
    "METHODS",
    "Event",
    "epsilon",
    "gaussian_epsilon",
    "most_rounds",
    "most_steps",
    "noise_for",
    "rough_epsilon",
    "together",
]

METHODS = ("pld", "rdp")
"""Privacy loss distributions, which are tight; Renyi divergences, which most published figures are from."""

_ONE_STEP = 200_000  # points of one release's distribution: about a second
_COMPOSED = 1_000_000  # of all releases together: about the same
_TAIL = 12.0  # standard deviations, beyond which nothing counts
_SMALLEST_NOISE = 0.05  # where already a single release says all that there is
_SIGNIFICANT = 4  # digits of a noise multiplier
_COARSE = 4.0  # of a rough epsilon: losses are told apart so much less finely


class Event(NamedTuple):
    """One release: a sum of clipped gradients, noised.

    What happens in a step to several sums over the same rows is one release with the noise of `together`.
    """

    noise: float
    """The noise's standard deviation, in units of the clipping norm."""
    rate: float = 1.0
    """The probability with which a row is in the batch, by itself; 1: every row is in it, or it is known which are."""


def together(*noises: float) -> float:
    """The noise multiplier of one release that tells as much as these, of the same rows, tell together."""
    if any(noise <= 0 for noise in noises):
        return 0.0
    precision = sum(noise**-2 for noise in noises)
    return precision**-0.5 if precision else math.inf


def epsilon(events: Sequence[tuple[Event, int]], delta: float, method: str = "pld") -> float:
    """The epsilon, at this delta, of each event as many times as is said beside it; never too small.

    Neighbours are data sets of which one has one row more.
    """
    return _epsilon(_counted(events), _checked_delta(delta), _checked_method(method), 1.0)


def rough_epsilon(events: Sequence[tuple[Event, int]], delta: float, method: str = "pld") -> float:
    """As `epsilon`, in a tenth of its time, and up to a hundredth larger: for a line of a log."""
    return _epsilon(_counted(events), delta, method, _COARSE)


def gaussian_epsilon(precision: float, delta: float) -> float:
    """The epsilon of Gaussian releases without sampling, of which `1 / noise**2` adds up to `precision`. Exact."""
    if precision <= 0:
        return 0.0
    if math.isinf(precision):
        return math.inf
    distance = math.sqrt(precision)
    if _gaussian_delta(0.0, distance) <= delta:
        return 0.0
    most = precision / 2 + distance * math.sqrt(-2 * math.log(delta))  # the tail's bound, which is never too small
    return _root(lambda value: _gaussian_delta(value, distance) - delta, 0.0, most)


def noise_for(epsilon: float, delta: float, rate: float, steps: int, method: str = "pld") -> float:
    """The least noise multiplier, to four digits, with which so many steps cost at most `epsilon`."""
    _checked_epsilon(epsilon)
    _checked_delta(delta)
    _checked_method(method)
    if steps < 1:
        raise ConfigError(f"steps={steps}: write how many releases there will be, 1 or more")
    _counted([(Event(1.0, rate), steps)])  # complains of the rate

    def cost(noise: float, by: str, coarse: float = 1.0) -> float:
        return _epsilon({Event(noise, rate): steps}, delta, by, coarse)

    found = _noise_above(lambda noise: cost(noise, "rdp"), epsilon)
    if found <= _SMALLEST_NOISE:
        return _SMALLEST_NOISE
    if method == "pld":
        found = _noise_below(lambda noise: cost(noise, "pld", _COARSE), epsilon, found)
        # The rough cost is a little too high. Nearby, a cost falls at least as fast as the noise rises.
        share = cost(found, "pld") / epsilon
        found *= share if 0.9 < share < 1 else 1.0
    found = _rounded_up(found)
    while cost(found, method) > epsilon:
        found = _rounded_up(found * (1 + 10.0**-_SIGNIFICANT))
    return found


def most_steps(
    event: Event,
    delta: float,
    epsilon: float,
    before: Sequence[tuple[Event, int]] = (),
    method: str = "pld",
    *,
    enough: int = 1_000_000,
) -> int:
    """How many releases like `event` can follow what was released `before` within `epsilon`, up to `enough`.

    Beyond a thousand, up to one in a thousand fewer than could.
    """
    _checked_epsilon(epsilon)
    _checked_delta(delta)
    _checked_method(method)
    _counted([(event, 1)])

    def excess(steps: int, coarse: float = 1.0) -> float:
        return _epsilon(_counted([*before, (event, steps)]), delta, method, coarse) ** 2 - epsilon**2

    if excess(0) > 0:
        return 0
    # What a rough cost allows, an exact one does.
    return _last_below(excess, _last_below(lambda steps: excess(steps, _COARSE), 0, enough), enough)


def most_rounds(
    rounds: Callable[[int], Sequence[tuple[Event, int]]], delta: float, epsilon: float, method: str, *, enough: int
) -> int:
    """The most rounds, up to `enough`, whose events cost at most `epsilon`, by a rough account: a few more may do."""
    _checked_epsilon(epsilon)

    def excess(count: int) -> float:
        return _epsilon(_counted(rounds(count)), delta, method, _COARSE) ** 2 - epsilon**2

    return 0 if excess(0) > 0 else _last_below(excess, 0, enough)


def _last_below(excess: Callable[[int], float], low: int, end: int) -> int:
    """The last number from `low` to `end` at which a rising function is not above zero, or one a little smaller.

    Each answer takes its time. The function is nearly a straight line: false position, with Illinois' rule, needs few.
    """
    gap, below = max(1, low // 64), -1.0
    high = min(low + gap, end)
    while low < end and (above := excess(high)) <= 0:
        gap *= 4
        low, below, high = high, above, min(high + gap, end)
    if low == end:
        return end
    while high - low > max(1, low // 1000):
        share = 0.5 if math.isinf(above) else below / (below - above)
        middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        found = excess(middle)
        if found <= 0:
            low, below, above = middle, found, above / 2
        else:
            high, above, below = middle, found, below / 2
    return low


def _checked_epsilon(epsilon: float) -> float:
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ConfigError(f"epsilon={epsilon}: write a number above 0; 1 to 10 is what is usual")
    return epsilon


def _checked_delta(delta: float) -> float:
    if not 0 < delta < 1:
        raise ConfigError(
            f"delta={delta}: write a probability above 0 and far below one over the number of rows, such as 1e-5"
        )
    return delta


def _checked_method(method: str) -> str:
    if method not in METHODS:
        raise ConfigError(f"accountant={method!r}: there are {' and '.join(map(repr, METHODS))}")
    return method


def _counted(events: Iterable[tuple[Event, int]]) -> dict[Event, int]:
    """How often each event happens; those that never do are left out."""
    counts: dict[Event, int] = {}
    for event, count in events:
        if not event.noise >= 0:
            raise ConfigError(f"noise multiplier {event.noise}: write 0 or more")
        if not 0 < event.rate <= 1:
            raise ConfigError(
                f"sampling rate {event.rate}: write a probability above 0 and at most 1, the batch size over the rows"
            )
        if count > 0:
            counts[event] = counts.get(event, 0) + count
    return counts


def _epsilon(counts: dict[Event, int], delta: float, method: str, coarse: float) -> float:
    if any(event.noise == 0 for event in counts):
        return math.inf
    counts = {event: count for event, count in counts.items() if math.isfinite(event.noise)}
    if not counts:
        return 0.0
    if method == "rdp":
        return _rdp(counts, delta)
    precision = sum(count / event.noise**2 for event, count in counts.items())
    if all(event.rate == 1 for event in counts):
        return gaussian_epsilon(precision, delta)
    if any(event.noise < _SMALLEST_NOISE for event in counts):
        return gaussian_epsilon(precision, delta)  # sampling takes next to nothing from so much
    return _pld(counts, delta, coarse)


def _rdp(counts: dict[Event, int], delta: float) -> float:
    from dp_accounting import dp_event  # noqa: PLC0415 - takes a second, and only those who ask for an epsilon need it
    from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415 - same

    accountant = RdpAccountant()
    for event, count in counts.items():
        gaussian = dp_event.GaussianDpEvent(event.noise)
        sampled = gaussian if event.rate == 1 else dp_event.PoissonSampledDpEvent(event.rate, gaussian)
        with _quiet():
            accountant.compose(sampled, count)
    return float(accountant.get_epsilon(delta))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orders that are left out because their sums do not converge are no news to the user: others are tighter."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _pld(counts: dict[Event, int], delta: float, coarse: float) -> float:
    interval = _interval(counts, coarse)
    parts = [_one_step(event, interval).self_compose(count) for event, count in counts.items()]
    return float(functools.reduce(lambda one, other: one.compose(other), parts).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=8)
def _one_step(event: Event, interval: float) -> PrivacyLossDistribution:
    from dp_accounting.pld import privacy_loss_distribution  # noqa: PLC0415 - as in `_rdp`

    return privacy_loss_distribution.from_gaussian_mechanism(
        event.noise, sampling_prob=event.rate, value_discretization_interval=interval
    )


def _interval(counts: dict[Event, int], coarse: float) -> float:
    """How finely losses are told apart, a power of two: so that the error is small, and the arrays are, too.

    Rounding is upwards: a coarse interval makes epsilon larger, never smaller.
    """
    moments = {event: _moments(event) for event in counts}
    wanted = min(math.sqrt(variance) for _, variance, _ in moments.values()) / 20 * coarse
    mean = sum(count * moments[event][0] for event, count in counts.items())
    variance = sum(count * moments[event][1] for event, count in counts.items())
    span = max(span for _, _, span in moments.values())
    least = max(span / _ONE_STEP, (mean + _TAIL * math.sqrt(variance)) / _COMPOSED)
    return float(2.0 ** round(math.log2(max(wanted, least))))


@functools.lru_cache(maxsize=64)
def _moments(event: Event) -> tuple[float, float, float]:
    """Mean and variance of one release's privacy loss, and the most that it can be but for nothing that counts."""
    import numpy as np  # noqa: PLC0415 - so that this module costs nothing

    noise, rate = event
    outcome = np.linspace(-_TAIL * noise, 1 + _TAIL * noise, 4001)
    without = np.exp(-0.5 * (outcome / noise) ** 2)
    shift = (2 * outcome - 1) / (2 * noise**2)
    loss = shift if rate == 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + shift)
    weights = (1 - rate) * without + rate * np.exp(-0.5 * ((outcome - 1) / noise) ** 2)
    weights /= weights.sum()
    mean = float(weights @ loss)
    return mean, float(weights @ (loss - mean) ** 2), float(loss[-1])


def _gaussian_delta(epsilon: float, distance: float) -> float:
    """The delta at `epsilon` of two Gaussians that are `distance` standard deviations apart."""
    from scipy.special import log_ndtr  # noqa: PLC0415 - as in `_rdp`

    first = log_ndtr(distance / 2 - epsilon / distance)
    second = epsilon + log_ndtr(-distance / 2 - epsilon / distance)
    return float(math.exp(first) * -math.expm1(min(0.0, second - first)))


def _root(function: Callable[[float], float], low: float, high: float, *, relative: float = 1e-9) -> float:
    """Where a falling function is zero: the upper end of an interval that narrow, at which it is not above zero."""
    while high - low > relative * high:
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high


def _noise_above(cost: Callable[[float], float], epsilon: float) -> float:
    """A noise multiplier that is enough, by an accountant that is quick."""
    high = 1.0
    while cost(high) > epsilon:
        high *= 2
        if high > 1e6:
            raise ConfigError(
                f"epsilon={epsilon}: no noise below a million times the clipping norm is enough; ask for a larger "
                "epsilon, fewer epochs or smaller batches"
            )
    low = high / 2
    while low > _SMALLEST_NOISE and cost(low) <= epsilon:
        low, high = low / 2, low
    if low <= _SMALLEST_NOISE and cost(_SMALLEST_NOISE) <= epsilon:
        return _SMALLEST_NOISE
    return _root(lambda noise: cost(noise) - epsilon, max(low, _SMALLEST_NOISE), high, relative=1e-5)


def _noise_below(cost: Callable[[float], float], epsilon: float, high: float) -> float:
    """The least noise multiplier, below `high`, by an accountant that takes its time: few of its answers are needed."""
    from scipy.optimize import brentq  # noqa: PLC0415 - as in `_rdp`

    def excess(noise: float) -> float:
        return math.log(max(cost(noise), 1e-300)) - math.log(epsilon)

    low = high
    while excess(low) <= 0:
        if low <= _SMALLEST_NOISE:
            return low
        high, low = low, max(low * 0.85, _SMALLEST_NOISE)
    return float(brentq(excess, low, high, rtol=1e-4, xtol=1e-7)) if low < high else high


def _rounded_up(noise: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(noise)) + 1 - _SIGNIFICANT)
    return round(math.ceil(noise / unit - 1e-9) * unit, 12)
