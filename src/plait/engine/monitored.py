"""`MonitoredSession`: a session that gives its hooks their life, recovers, and knows when to stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any

from plait.engine.hooks import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues, overrides
from plait.engine.op import GlobalStep, Op
from plait.engine.session import Session, feed_key, key_of
from plait.engine.task import TaskScope
from plait.errors import FetchError, OutOfRangeError, RecoverableError

__all__ = ["MonitoredSession"]

MAX_RECOVERIES = 10
"""How often one run is repeated."""

NO_VALUES = SessionRunValues()
log = logging.getLogger("plait")
_Active = tuple[list[SessionRunHook], list[SessionRunHook]]


class MonitoredSession:
    """Runs Ops with hooks around every run; see `plait.engine.hooks` for the order.

    `hooks` see every run; `scoped_hooks` only the runs of their task and mode. `session_creator` makes the session,
    and again after a recoverable error in a run, which is then repeated.
    """

    def __init__(
        self,
        session_creator: Callable[[], Session] | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        stop_grace_period_secs: float = 120,
        *,
        scoped_hooks: Mapping[TaskScope, Sequence[SessionRunHook]] | None = None,
        recover: bool = True,
    ) -> None:
        del stop_grace_period_secs  # TensorFlow waits that long for its queue threads; there are none here
        self._creator = session_creator or Session
        self._everywhere = list(hooks or ())
        self._scoped = {scope: list(some) for scope, some in (scoped_hooks or {}).items()}
        self._hooks = [*self._everywhere, *(hook for some in self._scoped.values() for hook in some)]
        self._recover = recover
        self._active: dict[Hashable, _Active] = {}
        self._stop = False
        self._closed = False
        for hook in self._hooks:
            hook.begin()
        self._session = self._create()

    def _create(self) -> Session:
        session = self._creator()
        self._session = session
        for hook in self._hooks:
            hook.after_create_session(session, None)
        return session

    def recreate(self) -> None:
        """Make the session anew, as after a recoverable error: `after_create_session` is called, `begin` is not."""
        self._stop = False
        self._create()

    @property
    def session(self) -> Session:
        """The session inside, which runs no hooks."""
        return self._session

    @property
    def global_step(self) -> GlobalStep:
        return self._session.global_step

    @property
    def may_stop(self) -> bool:
        """Whether a hook may ask to stop."""
        return any(hook.may_stop for hook in self._hooks)

    def should_stop(self) -> bool:
        return self._stop or self._closed

    def request_stop(self) -> None:
        self._stop = True

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """Run Ops with the hooks; after a recoverable error, in a new session, again."""
        if self._closed:
            raise FetchError("this session is closed: run() belongs inside `with MonitoredSession(...) as session:`")
        active = self._active.get(fetches) if isinstance(fetches, Op) else None
        if active is None:
            active = self._active_hooks(fetches)
        try:
            return self._hooked_run(fetches, feed_dict, active)
        except RecoverableError as error:
            if not self._recover:
                raise
            return self._run_again(fetches, feed_dict, active, error)

    def _run_again(
        self, fetches: Any, feed_dict: Mapping[Any, Any] | None, active: _Active, error: RecoverableError
    ) -> Any:
        for _ in range(MAX_RECOVERIES):
            log.warning("%s: %s; making the session anew", type(error).__name__, error)
            try:
                self._create()
                return self._hooked_run(fetches, feed_dict, active)
            except RecoverableError as another:
                error = another
        raise error

    def _hooked_run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None, active: _Active) -> Any:
        before, after = active
        context = SessionRunContext(fetches, feed_dict, self._session)
        asked: dict[SessionRunHook, SessionRunArgs] | None = None
        for hook in before:
            args = hook.before_run(context)
            if args is not None:
                asked = asked or {}
                asked[hook] = args
        if asked is None:
            values = self._session.run(fetches, feed_dict)
            for hook in after:
                hook.after_run(context, NO_VALUES)
        else:
            wanted = [fetches, *(args.fetches for args in asked.values())]
            values, *found = self._session.run(wanted, _merged_feeds(feed_dict, asked))
            results = dict(zip(asked, map(SessionRunValues, found), strict=True))
            for hook in after:
                hook.after_run(context, results.get(hook, NO_VALUES))
        if context.stop_requested:
            self._stop = True
        return values

    def _active_hooks(self, fetches: Any) -> _Active:
        """The hooks of this run that do something before it, and after it; worked out once for each set of fetches."""
        key = key_of(fetches)
        found = self._active.get(key)
        if found is None:
            scopes = self._session.plan(fetches).scopes
            hooks = [*self._everywhere, *(h for scope, some in self._scoped.items() if scope in scopes for h in some)]
            found = self._active[key] = (
                [hook for hook in hooks if overrides(hook, "before_run")],
                [hook for hook in hooks if overrides(hook, "after_run")],
            )
        return found

    def run_step_fn(self, step_fn: Callable[..., Any]) -> Any:
        """Call `step_fn(step_context)`; `step_context.session` runs without hooks, `run_with_hooks` with them."""
        return step_fn(StepContext(self))

    def close(self) -> None:
        """End normally: every hook's `end` is called once."""
        self._finish(None)

    def _finish(self, error: BaseException | None) -> None:
        if self._closed:
            return
        try:
            if error is None:
                for hook in self._hooks:
                    hook.end(self._session)
        finally:
            self._closed = True
            self._session.close()

    def __enter__(self) -> MonitoredSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        normal = isinstance(error, (OutOfRangeError, StopIteration))
        self._finish(None if normal else error)
        return normal


class StepContext:
    """What `run_step_fn` hands to the function."""

    def __init__(self, monitored: MonitoredSession) -> None:
        self._monitored = monitored

    @property
    def session(self) -> Session:
        return self._monitored.session

    def run_with_hooks(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        return self._monitored.run(fetches, feed_dict)

    def request_stop(self) -> None:
        self._monitored.request_stop()


def _merged_feeds(
    feed_dict: Mapping[Any, Any] | None, asked: Mapping[SessionRunHook, SessionRunArgs]
) -> dict[Any, Any]:
    feeds = {feed_key(key): value for key, value in (feed_dict or {}).items()}
    for hook, args in asked.items():
        for key, value in (args.feed_dict or {}).items():
            op = feed_key(key)
            if op in feeds:
                raise FetchError(
                    f"{op!r} is fed twice: by the caller or another hook, and by {type(hook).__name__}; feed it once"
                )
            feeds[op] = value
    return feeds
