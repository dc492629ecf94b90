"""Methods of workers that may be called from the driver, and how a call of one reaches the ranks."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from drivetrain.contracts.mesh import Call, DispatchMode, RankLayout
from drivetrain.seam.registry import resolve

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "_drivetrain_registration"


class Execute(str, enum.Enum):
    """Which ranks execute a call: those of its dispatch mode, or rank 0 of the group, to which the call goes whole."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True, kw_only=True)
class Registration:
    """How a call of a method reaches the ranks.

    Attributes:
        dispatch_mode: name of the dispatch mode, in lower case.
        mesh: name of the mesh whose layout the mode works with: ``train`` or ``rollout``.
        execute_mode: which ranks execute.
        blocking: whether a call waits for its result; if not, an executor of several processes gives a future.
    """

    dispatch_mode: str
    mesh: str
    execute_mode: Execute
    blocking: bool


def register(
    dispatch_mode: str = "one_to_all",
    *,
    mesh: str = "train",
    execute_mode: Execute | str = Execute.ALL,
    blocking: bool = True,
) -> Callable[[F], F]:
    """Mark a worker's method as callable from the driver; see :class:`Registration`.

    Names of modes are not case-sensitive: ``DP_COMPUTE_PROTO`` is ``dp_compute_proto``.
    """
    registered = Registration(dispatch_mode=dispatch_mode.lower(), mesh=mesh,
                              execute_mode=Execute(execute_mode.lower()), blocking=blocking)  # fmt: skip

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, registered)
        return method

    return mark


def registration(worker: type, method: str) -> Registration:
    """How a method is registered.

    Raises:
        AttributeError: the worker has no such method, or it is not registered.
    """
    found: Registration | None = getattr(getattr(worker, method), _ATTRIBUTE, None)
    if found is None:
        raise AttributeError(f"{worker.__name__}.{method} is not registered for calls from the driver")
    return found


def registered_methods(worker: type) -> list[str]:
    """Names of a worker's methods that are registered."""
    return [name for name in dir(worker) if hasattr(getattr(worker, name), _ATTRIBUTE)]


@dataclass(frozen=True)
class DispatchedCall:
    """A call, split: rank ``ranks[i]`` executes with ``calls[i]``; no other rank takes part."""

    ranks: list[int]
    calls: list[Call]
    _mode: DispatchMode
    _layouts: list[RankLayout]

    def collect(self, outputs: Sequence[Any]) -> Any:
        """The caller's result of the results of ``ranks``, in their order. To be called once."""
        return self._mode.collect(self._layouts, outputs)


def dispatch_call(
    worker: type, method: str, layouts: Sequence[RankLayout], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DispatchedCall:
    """Split a call of a registered method over the ranks of a group.

    Args:
        worker: class of the group's workers.
        layouts: of every rank of the group, in order, in the mesh that ``registration(worker, method)`` names.

    Raises:
        AttributeError: the method is not registered.
        TypeError, ValueError: the arguments are not the method's, or cannot be split; the argument is named.
    """
    registered = registration(worker, method)
    mode: DispatchMode = resolve("dispatch_modes", registered.dispatch_mode)()
    ranks = mode.ranks(layouts)
    chosen = [layouts[rank] for rank in ranks]
    if registered.execute_mode is Execute.RANK_ZERO:
        ranks, chosen = [0], [RankLayout()]
    where = f"{worker.__name__}.{method}"
    try:
        named = _by_name(getattr(worker, method), args, kwargs)
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from error
    try:
        calls = mode.split(chosen, *named)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return DispatchedCall(ranks, calls, mode, chosen)


def _by_name(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The arguments by name, however they were given; as ``*args`` alone those that have no name."""
    signature = inspect.signature(method)
    bound = signature.bind(None, *args, **kwargs)  # None in place of self
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    if kinds.keys() & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        return bound.args[1:], bound.kwargs
    named = dict(list(bound.arguments.items())[1:])
    named |= named.pop(kinds.get(inspect.Parameter.VAR_KEYWORD, ""), {})
    return (), named
