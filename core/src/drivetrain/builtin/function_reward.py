"""The reward ``function``: a function of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import NotRequired, Required, TypedDict

from drivetrain.builtin.per_sample import PerSample
from drivetrain.contracts.data import RewardSample, Score
from drivetrain.errors import UserError

if TYPE_CHECKING:
    from drivetrain.builtin.configs import FunctionRewardConfig

SAMPLE_FIELDS = frozenset(field.name for field in fields(RewardSample))


class FunctionReward(PerSample):
    """Calls the function once a sample.

    Parameters named like a field of ``RewardSample`` get that field; all others are set by ``args``, checked against
    the function's annotations. It returns a number, a bool (whether the answer is right) or a ``Score``.
    """

    def __init__(self, config: FunctionRewardConfig) -> None:
        """Find the function and check ``args``; raises UserError."""
        self._function = _load(config.path)
        self._args = _checked(self._function, config)
        self._fields = [name for name in inspect.signature(self._function).parameters if name in SAMPLE_FIELDS]

    def judge(self, sample: RewardSample) -> Score | float:
        chosen = {name: getattr(sample, name) for name in self._fields}
        return self._function(**chosen, **self._args)  # type: ignore[no-any-return]


def _load(path: str) -> Callable[..., Any]:
    place, _, name = path.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        function = getattr(module, name)
    except Exception as error:
        raise UserError(f"cannot load the reward function: {type(error).__name__}: {error}", where=path,
                        mend="path is package.module:function or ./file.py:function") from error  # fmt: skip
    if not callable(function):
        raise UserError(f"{name!r} is no function", where=path, mend="name a function")
    return function  # type: ignore[no-any-return]


def _checked(function: Callable[..., Any], config: FunctionRewardConfig) -> dict[str, Any]:
    """The values of ``args``, converted to the annotated types."""
    try:
        hints = get_type_hints(function, include_extras=True) if inspect.isroutine(function) else {}
    except NameError as error:
        raise UserError(f"an annotation of the reward function is not known: {error}", where=config.path,
                        mend="import the name outside TYPE_CHECKING") from error  # fmt: skip
    own: dict[str, Any] = {}
    others: Literal["forbid", "allow"] = "forbid"
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            others = "allow"
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise UserError(f"parameter {name!r} cannot be given by name", where=config.path,
                            mend="let the function take keyword arguments")  # fmt: skip
        elif name not in SAMPLE_FIELDS:
            needed = Required if parameter.default is parameter.empty else NotRequired
            own[name] = needed[hints.get(name, Any)]
    if taken := SAMPLE_FIELDS & set(config.args):
        raise UserError(f"args sets {', '.join(sorted(taken))}, which come from the sample", where=config.path,
                        mend="remove them from args, or rename the function's parameters")  # fmt: skip
    typed_dict: Any = TypedDict  # its keys are not known to a type checker
    shape = typed_dict("Args", own)
    shape.__pydantic_config__ = ConfigDict(extra=others, arbitrary_types_allowed=True)
    try:
        args: dict[str, Any] = TypeAdapter(shape).validate_python(config.args)
    except ValidationError as error:
        said = {"missing": "missing", "extra_forbidden": "unknown"}
        rows = [(".".join(map(str, e["loc"])), said.get(e["type"], e["msg"])) for e in error.errors()]
        takes = f"{config.path} takes {', '.join(own) or 'no arguments besides fields of the sample'}"
        raise UserError("args does not fit the reward function", where=config.path, details=rows, mend=takes) from error
    return args
