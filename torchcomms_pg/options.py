"""Options of a communicator and of single operations."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from torchcomms_pg import _C, env

Hints = Mapping[str, str]

# Hints for the shm backend.
TIMING = "torchcomm::shm::timing"
TAG = "torchcomm::shm::tag"
_LARGEST_TAG = 2**31 - 1
# Two names of one hint of the nccl backend, for the creation of a communicator. Other backends
# check the value and ignore it, so a program can pass the hint whichever backend it uses.
HIGH_PRIORITY = ("torchcomm::ncclx::high_priority_stream", "torchcomm::nccl::high_priority_stream")

# Hints for fields of ncclConfig_t, which the nccl backend passes to NCCL. A hint has NCCL's name of
# the field or the name in `NcclConfig`, and may have this prefix.
NCCL_PREFIX = "torchcomm::nccl::"
_CONFIG_FIELDS = {
    prefix + name: field
    for prefix in ("", NCCL_PREFIX)
    for name, field in _C.nccl_config_names.items()
}

COMMUNICATOR_HINTS = {TIMING, *HIGH_PRIORITY, *_CONFIG_FIELDS}
MESSAGE_HINTS = {TAG, *HIGH_PRIORITY}
OPERATION_HINTS = set(HIGH_PRIORITY)

_ignored: set[str] = set()  # unknown hints of which this process has warned


@dataclass
class CommOptions:
    """Options of a communicator. An option that is None takes the environment's value.

    Attributes:
        abort_process_on_timeout_or_error: whether a timeout or a failure ends the process, after
            the abort hooks; otherwise it raises CommError.
            By default TORCHCOMM_ABORT_ON_ERROR, which is true if it is not set.
        timeout: limit of an operation's time, from its issue.
            By default TORCHCOMM_TIMEOUT_SECONDS, which is 600 if it is not set.
        store: the store for the rendezvous. By default the store at MASTER_ADDR and MASTER_PORT.
        hints: see docs/api.md.
    """

    abort_process_on_timeout_or_error: bool | None = None
    timeout: timedelta | None = None
    store: dist.Store | None = None
    hints: dict[str, str] = field(default_factory=dict)

    def resolved(self) -> CommOptions:
        """Returns a copy with the environment's values in place of None."""
        abort = self.abort_process_on_timeout_or_error
        return CommOptions(
            env.abort_on_error() if abort is None else abort,
            env.default_timeout() if self.timeout is None else self.timeout,
            self.store,
            dict(self.hints),
        )


def config_of(what: str, hints: Hints) -> _C.NcclConfig:
    """Returns the configuration for NCCL that `hints` describe. `what`: named in errors.

    Raises:
        ValueError: NCCL does not accept a value, or two hints name one field.
    """
    config = _C.NcclConfig()
    said: dict[str, str] = {}
    for name, value in hints.items():
        field = _CONFIG_FIELDS.get(name)
        if field is None:
            continue
        if field in said:
            raise ValueError(f"{what}: hints {said[field]} and {name} are the same; pass one")
        said[field] = name
        _set(what, config, name, value)
    return config


def _set(what: str, config: _C.NcclConfig, hint: str, value: str) -> None:
    field = _CONFIG_FIELDS[hint]
    try:
        if field in ("net_name", "comm_name"):
            setattr(config, field, value)
        else:
            setattr(config, field, int(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: hint {hint} is {value!r}: {error}") from None


def check_timeout(what: str, timeout: timedelta | None) -> None:
    """Raises TypeError or ValueError unless `timeout` is None or a positive timedelta."""
    if timeout is None:
        return
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"{what}: timeout is {timeout!r}, wanted a datetime.timedelta or None; "
            "for example datetime.timedelta(seconds=60)"
        )
    if timeout < timedelta(milliseconds=1):
        raise ValueError(f"{what}: timeout is {timeout}, wanted a millisecond or more")


def check_hints(what: str, hints: Hints, known: set[str]) -> None:
    """Checks hints. Only warns of an unknown name, since the hint may be for another backend.

    Warns of a name once in a process.

    Raises:
        TypeError: `hints` is no dict of strings.
        ValueError: a known hint has an invalid value.
    """
    if not isinstance(hints, Mapping) or not all(isinstance(name, str) for name in hints):
        raise TypeError(f"{what}: hints is {hints!r}, wanted a dict of strings or None")
    for name, value in hints.items():
        if name not in known:
            _warn_ignored(what, name, known)
        elif name in _CONFIG_FIELDS:
            _set(what, _C.NcclConfig(), name, value)
        elif name == TAG:
            if not str(value).isdecimal() or int(value) > _LARGEST_TAG:
                raise ValueError(
                    f"{what}: hint {name} is {value!r}, wanted a number from 0 to {_LARGEST_TAG}"
                )
        elif value not in ("true", "false"):
            raise ValueError(f"{what}: hint {name} is {value!r}, wanted 'true' or 'false'")


def _warn_ignored(what: str, name: str, known: set[str]) -> None:
    if name in _ignored:
        return
    _ignored.add(name)
    close = difflib.get_close_matches(name, sorted(known), 1, 0.8)
    meant = f"; did you mean {close[0]!r}?" if close else "; docs/api.md lists those that have one"
    warnings.warn(f"{what}: hint {name!r} has no effect here{meant}", stacklevel=2)
