"""`MonitoredSession`: a session that gives its hooks their life, recovers, and knows when to stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any

from plait.engine.hooks import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues, overrides
from plait.engine.op import GlobalStep
from plait.engine.session import Session, key_of
from plait.engine.task import TaskScope
from plait.errors import FetchError, OutOfRangeError, RecoverableError

__all__ = ["MonitoredSession"]

MAX_RECOVERIES = 10
"""How often one run is repeated."""

log = logging.getLogger("plait")
_Hooks = tuple[list[SessionRunHook], list[SessionRunHook]]


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
        self._active: dict[Hashable, _Hooks] = {}
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
        self._create()

    @property
    def session(self) -> Session:
        """The session inside, which runs no hooks."""
        return self._session

    @property
    def global_step(self) -> GlobalStep:
        return self._session.global_step

    def should_stop(self) -> bool:
        return self._stop or self._closed

    def request_stop(self) -> None:
        self._stop = True

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """Run Ops with the hooks; after a recoverable error, in a new session, again."""
        if self._closed:
            raise FetchError("this session is closed: run() belongs inside `with MonitoredSession(...) as session:`")
        before, after = self._active_hooks(fetches)
        for _ in range(MAX_RECOVERIES if self._recover else 0):
            try:
                return self._hooked_run(fetches, feed_dict, before, after)
            except RecoverableError as error:
                log.warning("%s: %s; making the session anew", type(error).__name__, error)
                self._create()
        return self._hooked_run(fetches, feed_dict, before, after)

    def _hooked_run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None,
        before: list[SessionRunHook],
        after: list[SessionRunHook],
    ) -> Any:
        context = SessionRunContext(SessionRunArgs(fetches, feed_dict), self._session)
        asked: dict[SessionRunHook, SessionRunArgs] = {}
        for hook in before:
            args = hook.before_run(context)
            if args is not None:
                asked[hook] = args
        if asked:
            wanted = [fetches, *(args.fetches for args in asked.values())]
            values, *extra = self._session.run(wanted, _merged_feeds(feed_dict, asked))
            results = dict(zip(asked, extra, strict=True))
        else:
            values = self._session.run(fetches, feed_dict)
            results = {}
        for hook in after:
            hook.after_run(context, SessionRunValues(results.get(hook)))
        if context.stop_requested:
            self._stop = True
        return values

    def _active_hooks(self, fetches: Any) -> _Hooks:
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
    feeds = dict(feed_dict or {})
    for hook, args in asked.items():
        for key, value in (args.feed_dict or {}).items():
            if key in feeds:
                raise FetchError(f"{key!r} is fed twice: by the caller or another hook, and by {type(hook).__name__}")
            feeds[key] = value
    return feeds
