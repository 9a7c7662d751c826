"""How long one party waits for the other, and what it says while it waits and when it gives up."""

from __future__ import annotations

import logging
import time

__all__ = ["Patience"]

FIRST_NOTE, NOTES = 5.0, 60.0
"""After how many seconds a wait is logged, and how often then."""
LIVING_TIMEOUTS, WORD_TIMEOUTS = 10, 100
"""How many times longer a peer is waited for that is there, and does not do what is waited for: a tensor, which belongs
to a step that has begun; a word, before which it may train alone for hours."""

log = logging.getLogger("plait")


class Patience:
    """One wait of `own` for `peer`, for `what`. A peer that is heard is given more time than a silent one."""

    def __init__(self, own: str, peer: str, what: str, timeout: float, *, times: int = LIVING_TIMEOUTS) -> None:
        self._own, self._peer, self._what, self._timeout = own, peer, what, timeout
        self._longest = times * timeout
        self._begin = time.monotonic()
        self._note = self._begin + FIRST_NOTE

    def seconds(self, heard: float | None) -> float:
        """For how long to sleep, if nothing wakes; not above 0 once patience is over. `heard`: when, if ever."""
        return min(self._end(heard), self._note) - time.monotonic()

    def is_over(self, heard: float | None) -> bool:
        return time.monotonic() >= self._end(heard)

    def note(self) -> None:
        """Log the wait, if it is time to. Not with a lock held: a log may be slow."""
        now = time.monotonic()
        if now >= self._note:
            self._note = now + NOTES
            text = "the %s waits for the %s (for %s, since %s)"
            log.info(text, self._own, self._peer, self._what, _clock(self._begin))

    def text(self, heard: float | None, waiting: int) -> str:
        """What the error says. `waiting`: bytes that came and that nobody has taken."""
        seconds = f"{round(time.monotonic() - self._begin, 1):g}"
        last = f"last heard at {_clock(heard)}" if heard is not None else "never heard"
        text = (
            f"the {self._own} waited {seconds} s for the {self._peer} (for {self._what}, since "
            f"{_clock(self._begin)}; {last}): "
        )
        if heard is None:
            return text + f"start the {self._peer}, and see that the two can reach each other"
        if time.monotonic() - heard >= self._timeout:
            return text + f"it fell silent, see its log; timeout={self._timeout:g} is how long it may be silent"
        text += "it is there, and does something else, see its log"
        if waiting:
            text += f"; {waiting} bytes of other messages from it wait to be taken"
        return text

    def _end(self, heard: float | None) -> float:
        silent = max(self._begin, heard or self._begin) + self._timeout
        return min(silent, self._begin + self._longest)


def _clock(moment: float) -> str:
    """A moment of the monotonic clock, as clocks on walls show it."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - moment)))
