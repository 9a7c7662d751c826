"""Every way plait fails, on one screen.

PlaitError
├── UsageError (ValueError)      something that you wrote cannot work
│   ├── ConfigError              a setting, a flag or a configuration file
│   ├── DataError                an input: none, empty, changed since the checkpoint
│   ├── FetchError               what `Session.run` was asked for or fed
│   ├── FunctionError            what a function of yours returned
│   ├── StageError               stages: names, order, nesting
│   ├── TaskError                tasks: unknown, twice, without an optimizer
│   └── VariableError            variables and scopes: twice, missing, in two scopes
├── ClusterError                 a process of the cluster is lost, never came, or may not join
├── FederalError                 the other party is lost, refused, or wants something else
├── CheckpointError              a checkpoint cannot be written or read
│   └── MismatchError            it can be read, but belongs to another model
├── NanLossError                 a loss is not a number any more
├── OutOfRangeError              the end of the data: how a pass ends, not a mistake
└── RecoverableError             a session that meets one is made anew
    ├── AbortedError             a run was cut off by something outside it
    └── UnavailableError         something that it needs cannot be reached just now
"""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DataError",
    "FederalError",
    "FetchError",
    "FunctionError",
    "MismatchError",
    "NanLossError",
    "OutOfRangeError",
    "PlaitError",
    "RecoverableError",
    "StageError",
    "TaskError",
    "UnavailableError",
    "UsageError",
    "VariableError",
]


class PlaitError(Exception):
    """The base of everything that plait raises by itself."""


class UsageError(PlaitError, ValueError):
    """Something that you wrote cannot work; the text says what to write instead."""


class ConfigError(UsageError):
    """A setting, a flag or a configuration file is wrong."""


class DataError(UsageError):
    """An input has no data, or not the data that the checkpoint was made with."""


class FetchError(UsageError):
    """`Session.run` was asked for, or fed, something that is not an Op."""


class FunctionError(UsageError):
    """A function of yours returned what it may not."""


class StageError(UsageError):
    """Stages that do not fit the journal, or each other."""


class TaskError(UsageError):
    """A task is unknown, defined twice, or lacks a part."""


class VariableError(UsageError):
    """A variable or a scope is missing, made twice, or claimed twice."""


class ClusterError(PlaitError):
    """A process of the cluster is lost, never came, or may not join; the text says which."""


class FederalError(PlaitError):
    """The other party is lost, is refused, or wants something else; the text says what, and since when."""


class CheckpointError(PlaitError):
    """A checkpoint cannot be written or read."""


class MismatchError(CheckpointError):
    """A checkpoint can be read, but belongs to another model."""


class NanLossError(PlaitError, RuntimeError):
    """A loss is not a number any more."""


class OutOfRangeError(PlaitError):
    """The end of the data. A pass ends with it; a `MonitoredSession` takes it for a normal end."""


class RecoverableError(PlaitError):
    """Raise one inside a run, and the monitored session is made anew and the run repeated."""


class AbortedError(RecoverableError):
    """A run was cut off by something outside it."""


class UnavailableError(RecoverableError):
    """Something that a run needs cannot be reached just now."""
