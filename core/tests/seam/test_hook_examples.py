"""Every hook has an example that works, and observers do not disturb a run."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap

import pytest
from little_distributions import Site

import drivetrain
from drivetrain.contracts import observers
from drivetrain.seam import hookspecs
from drivetrain.seam.specs import SPEC_TYPES, PluginSpec

HOOKS = {name: hook for name, hook in vars(hookspecs).items() if hasattr(hook, "drivetrain_spec")}


def example(name: str) -> str:
    """The part of a hook's documentation to paste."""
    text = inspect.cleandoc(HOOKS[name].__doc__ or "")
    match = re.fullmatch(r"[A-Z][^\n]+::\n\n((?:    [^\n]+\n)+)\nReturns: [^\n]+", text)
    assert match, f"the documentation of {name} is no sentence, example and Returns:\n{text}"
    return textwrap.dedent(match[1])


def test_hooks_and_specs_correspond() -> None:
    annotations = {name: hook.__annotations__ for name, hook in HOOKS.items()}
    offered = {name: a["return"] for name, a in annotations.items() if a["return"] != "None"}
    assert offered == {f"drivetrain_{hook}": f"Iterable[specs.{spec.__name__}]" for hook, spec in SPEC_TYPES.items()}
    exported = {getattr(drivetrain, name) for name in drivetrain.__all__ if name.endswith("Spec")}
    assert exported == {PluginSpec, *SPEC_TYPES.values()}


@pytest.mark.parametrize("name", HOOKS)
def test_the_example_in_the_documentation_works(site: Site, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    annotations = HOOKS[name].__annotations__
    spec = annotations["return"].removeprefix("Iterable[specs.").removesuffix("]")
    names = "hookimpl" if spec == "None" else f"{spec}, hookimpl"
    site.add("acme-mine", f"from drivetrain import {names}\n\n{example(name)}")
    registry = site.registry()
    assert registry.failures == []
    hook = name.removeprefix("drivetrain_")
    if spec == "None":
        event = getattr(observers, annotations["event"])
        told = event(**{field.name: {} for field in dataclasses.fields(event)})
        assert registry.notify(hook, told) == []
        assert capsys.readouterr().out, "the observer was called"
        (row,) = [row for row in registry.rows() if row.kind == "observers"]
        assert (row.name, row.summary, row.status) == ("mine", name, "ok")
    else:
        rows = [row for row in registry.rows() if row.distribution == "acme-mine"]
        assert [(row.kind, row.status) for row in rows] == [(hook, "ok")]
        offered = registry.select(hook, rows[0].name).spec
        assert type(offered).__name__ == spec and offered.summary
        assert f"``{spec}``" in (HOOKS[name].__doc__ or "")


OBSERVERS = """
    from drivetrain import hookimpl

    @hookimpl
    def drivetrain_step_ended({arguments}):
        {body}
"""


def test_observers_that_raise_are_reported_and_others_are_called(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = {"acme-a": "print('a', event)", "acme-b": "raise ValueError('no disk')", "acme-c": "raise SystemExit(1)",
              "acme-d": "print('d', event)"}  # fmt: skip
    for distribution, body in bodies.items():
        site.add(distribution, OBSERVERS.replace("{arguments}", "event").replace("{body}", body))
    complaints = site.registry().notify("step_ended", 7)
    assert sorted(complaints) == [
        "observer acme-b:b raised ValueError: no disk",
        "observer acme-c:c raised SystemExit: 1",
    ]
    assert sorted(capsys.readouterr().out.splitlines()) == ["a 7", "d 7"]


def test_an_observer_may_omit_the_argument(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.add("acme-old", OBSERVERS.replace("{arguments}", "").replace("{body}", "print('called')"))
    assert site.registry().notify("step_ended", 7) == []
    assert capsys.readouterr().out == "called\n"


def test_no_observer_is_no_error(site: Site) -> None:
    assert site.registry().notify("run_failed", None) == []


def test_specs_are_frozen_and_keyword_only() -> None:
    for spec in SPEC_TYPES.values():
        parameters = dataclasses.fields(spec)
        assert all(field.kw_only for field in parameters) and spec.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert spec.noun != PluginSpec.noun and 1 in spec.versions
