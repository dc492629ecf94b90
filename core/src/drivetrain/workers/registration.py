"""Methods of workers that may be called from the driver, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "_drivetrain_registration"


@dataclass(frozen=True, kw_only=True)
class Registration:
    """How a call of a method reaches the ranks.

    Attributes:
        dispatch_mode: name of the dispatch mode.
        mesh: name of the mesh whose layout the mode works with: ``train`` or ``rollout``.
    """

    dispatch_mode: str
    mesh: str


def register(dispatch_mode: str = "one_to_all", *, mesh: str = "train") -> Callable[[F], F]:
    """Mark a worker's method as callable from the driver; see :class:`Registration`."""

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, Registration(dispatch_mode=dispatch_mode, mesh=mesh))
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
