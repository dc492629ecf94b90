"""What is found, and what becomes of distributions that are spoilt: a row each, and never a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from little_distributions import GOOD, Site, build_wheel

from drivetrain.errors import PluginError
from drivetrain.seam.registry import Registry, Row


def row(registry: Registry, name: str) -> Row:
    (found,) = [row for row in registry.rows() if row.name == name]
    return found


def test_a_plugin_is_found_listed_and_loaded(site: Site) -> None:
    site.add("acme-drivetrain-dapo", version="0.3")
    registry = site.registry()
    assert "dapo" in registry.names("algorithms")
    assert row(registry, "dapo") == Row(kind="algorithms", name="dapo", distribution="acme-drivetrain-dapo",
                                        version="0.3", summary="Does dapo.", status="ok")  # fmt: skip
    assert registry.load("algorithms", "dapo").__module__ == "acme_drivetrain_dapo.work"
    assert registry.failures == []


def test_what_pip_installs_is_listed_by_the_program(tmp_path: Path) -> None:
    pytest.importorskip("pip")
    wheel, target = build_wheel(tmp_path, "acme-drivetrain-nova"), tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    program = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", "plugins", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(target)}
    listed = json.loads(subprocess.run(program, check=True, capture_output=True, env=environment).stdout)
    assert {"kind": "algorithms", "name": "nova", "distribution": "acme-drivetrain-nova", "version": "1.0",
            "summary": "Does nova.", "status": "ok", "reason": ""} in listed  # fmt: skip


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("import missing_engine", "does not import: ModuleNotFoundError: No module named 'missing_engine'"),
        ("raise SystemExit(3)", "does not import: SystemExit: 3"),
        ("def broken(:", "does not import: SyntaxError: invalid syntax (plugin.py, line 1)"),
        ("raise RuntimeError('one\\n  two')", "does not import: RuntimeError: one"),
        ("", "implements no hook in acme_bad.plugin; is @drivetrain.hookimpl missing?"),
        (
            "from drivetrain import hookimpl\n@hookimpl\ndef drivetrain_algoritms(): return []",
            "implements unknown hook 'drivetrain_algoritms'; did you mean 'drivetrain_algorithms'?",
        ),
        (
            "from drivetrain import hookimpl\n@hookimpl\ndef drivetrain_rewards(config): return []",
            "implements a hook wrongly: hookimpl definition: drivetrain_rewards(config); Argument(s) {'config'} are "
            "declared in the hookimpl but can not be found in the hookspec",
        ),
        (
            "from drivetrain import hookimpl\n@hookimpl\ndef drivetrain_rewards(): return [{'name': 'mine'}]",
            "offers dict as one of rewards, which take RewardSpec",
        ),
        (
            "from drivetrain import RewardSpec, hookimpl\n@hookimpl\ndef drivetrain_rewards(): RewardSpec(nam=1)",
            "cannot be asked for rewards: TypeError: RewardSpec.__init__() got an unexpected keyword argument 'nam'",
        ),
        (
            "from drivetrain import hookimpl\n@hookimpl\ndef drivetrain_rewards(): raise SystemExit",
            "cannot be asked for rewards: SystemExit",
        ),
        (
            "from drivetrain import hookimpl\n@hookimpl\ndef drivetrain_rewards(): pass",
            "cannot be asked for rewards: TypeError: 'NoneType' object is not iterable",
        ),
        (
            "from drivetrain import hookimpl\n@hookimpl(wrapper=True)\ndef drivetrain_rewards(): return (yield)",
            "wraps drivetrain_rewards, which is not possible: implementations are called one by one",
        ),
        (
            "from drivetrain import RewardSpec, hookimpl\n@hookimpl\ndef drivetrain_rewards():\n"
            "    return 2 * [RewardSpec(name='mine', summary='', factory='a:b')]",
            "offers reward 'mine' twice",
        ),
    ],
)
def test_a_broken_plugin_is_a_row_and_others_load(site: Site, plugin: str, reason: str) -> None:
    site.add("acme-bad", plugin)
    site.add("acme-dapo")
    registry = site.registry()
    bad = row(registry, "bad")
    assert (bad.status, bad.distribution, bad.reason) == ("broken", "acme-bad", reason)
    assert row(registry, "dapo").status == "ok"
    with pytest.raises(PluginError, match="acme-bad 1.0 ") as raised:
        registry.select("algorithms", "bad")
    assert raised.value.__cause__ is not None, "the cause is chained"
    assert reason in str(raised.value)


def test_nothing_of_a_broken_plugin_stays(site: Site) -> None:
    site.add("acme-half", GOOD + """
    @hookimpl
    def drivetrain_step_ended(event):
        raise AssertionError("an observer of a plugin that was not loaded")

    @hookimpl
    def drivetrain_trackers():
        raise ValueError("half done")
    """)  # fmt: skip
    registry = site.registry()
    assert row(registry, "half").status == "broken"
    assert "half" not in registry.names("algorithms")
    assert registry.notify("step_ended", None) == []


def test_a_missing_package_is_told_before_the_plugin_is_imported(site: Site) -> None:
    site.add("acme-slow", "raise AssertionError('imported')", requires=["no-such-engine>=2", "drivetrain-core"])
    slow = row(site.registry(), "slow")
    assert (slow.status, slow.reason) == ("skewed", "needs no-such-engine>=2; it is not installed")


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("drivetrain-core<0.1", "needs drivetrain-core<0.1; this is 0.2.0"),
        ("Drivetrain_Core>=1,<2", "needs Drivetrain_Core<2,>=1; this is 0.2.0"),
        ("acme-dapo>1", "needs acme-dapo>1; installed is 1.0"),
        ("not a requirement", "has the malformed requirement 'not a requirement'"),
        ("drivetrain-core; extra == 'all'", ""),
        ("no-such-engine; extra == 'gpu'", ""),
        ("no-such-engine; python_version < '3'", ""),
        ("drivetrain-core>=0.2.0.dev1", ""),
    ],
)
def test_requirements(site: Site, requirement: str, reason: str) -> None:
    site.add("acme-dapo")
    site.add("acme-other", requires=[requirement])
    found = row(site.registry(), "other")
    assert (found.status, found.reason) == ("skewed" if reason else "ok", reason)


def test_one_entry_point_name_in_two_distributions_loses_neither(site: Site) -> None:
    for distribution, name in (("acme-one", "first"), ("acme-two", "second")):
        package = distribution.replace("-", "_")
        site.add(distribution, name=name, entry_points={"plugin": f"{package}.plugin"})
    registry = site.registry()
    assert registry.names("algorithms") == ["first", "second"]


def test_one_module_announced_by_two_distributions(site: Site) -> None:
    package = site.add("acme-one")
    site.add("acme-two", entry_points={"two": f"{package}.plugin"})
    registry = site.registry()
    two = row(registry, "two")
    assert (two.status, two.reason) == ("conflict", "announces acme_one.plugin, as acme-one:one does")
    assert [r.distribution for r in registry.rows() if r.name == "one"] == ["acme-one"]


def test_the_first_of_two_versions_on_the_path_counts(site: Site, tmp_path: Path) -> None:
    site.add("acme-dapo", version="2.0")
    older = Site(tmp_path)
    older.add("acme-dapo", version="1.0")
    from drivetrain.seam.discovery import scan

    found = [c.version for c in scan([str(site.folder), str(tmp_path)]) if c.distribution == "acme-dapo"]
    assert found == ["2.0"]


def test_spoilt_metadata_is_a_row(site: Site) -> None:
    site.add("acme-spoilt")
    (site.folder / "acme_spoilt-1.0.dist-info" / "entry_points.txt").write_text("[drivetrain]\nno equals sign\n")
    site.add("acme-cut")
    (site.folder / "acme_cut-1.0.dist-info" / "METADATA").unlink()
    registry = site.registry()
    spoilt = row(registry, "acme-spoilt")
    assert (spoilt.status, spoilt.reason) == ("skewed", "has metadata that cannot be read")
    assert row(registry, "cut").distribution == "unknown"


@pytest.mark.parametrize("name", ["side", "acme-side", "Acme_Side"])
def test_a_disabled_plugin_is_never_imported(site: Site, tmp_path: Path, name: str) -> None:
    trace = tmp_path / "imported"
    site.add("acme-side", GOOD + f"\n    open({str(trace)!r}, 'w').close()")
    registry = site.registry(name)
    side = row(registry, "side")
    assert (side.status, side.reason) == ("disabled", "is switched off by DRIVETRAIN_DISABLE")
    assert not trace.exists()
    with pytest.raises(PluginError, match=r"not loadable   side \(acme-side 1.0 is switched off by DRIVETRAIN_DISABLE"):
        registry.select("algorithms", "side")
    site.registry()
    assert trace.exists(), "the trace shows an import"


def test_the_program_reads_the_variable(site: Site, tmp_path: Path) -> None:
    trace = tmp_path / "imported"
    site.add("acme-side", GOOD + f"\n    open({str(trace)!r}, 'w').close()")
    site.add("acme-dapo")
    environment = {**os.environ, "PYTHONPATH": str(site.folder), "DRIVETRAIN_DISABLE": "nothing, side"}
    code = "from drivetrain.seam.registry import get_registry; print(*get_registry().names('algorithms'))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert "dapo" in done.stdout.split() and "side" not in done.stdout.split()
    assert not trace.exists()
