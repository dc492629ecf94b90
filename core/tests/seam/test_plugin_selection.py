"""Selection is by name and never by order, and nothing falls back to something else."""

from __future__ import annotations

import pytest
from little_distributions import GOOD, Site

from drivetrain.errors import PluginError
from drivetrain.seam import registry as registry_module
from drivetrain.seam.first_party import FIRST_PARTY


def message(site: Site, name: str, hook: str = "algorithms") -> str:
    with pytest.raises(PluginError) as raised:
        site.registry().select(hook, name)
    return str(raised.value)


def test_an_unknown_name_is_answered_with_all_that_is_known(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIRST_PARTY, "algorithms", {"grpo": "drivetrain-algo-grpo", "ppo": "drivetrain-algo-ppo"})
    site.add("drivetrain-algo-ppo", version="0.1.0", package="little_ppo")
    site.add("acme-dapo", version="0.3", requires=["drivetrain-core<0.1"])
    assert message(site, "gpro").splitlines() == [
        "unknown algorithm 'gpro'",
        "  did you mean   grpo (not installed: pip install drivetrain-algo-grpo)",
        "  installed      ppo (drivetrain-algo-ppo 0.1.0)",
        "  not loadable   dapo (acme-dapo 0.3 needs drivetrain-core<0.1; this is 0.2.0)",
    ]
    assert "did you mean   ppo\n" in message(site, "pppo")


def test_what_is_installed_but_broken_is_not_called_uninstalled(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIRST_PARTY, "algorithms", {"grpo": "drivetrain-algo-grpo"})
    site.add("drivetrain-algo-grpo", "import missing_engine", package="little_grpo")
    assert message(site, "grpo").splitlines() == [
        "unknown algorithm 'grpo'",
        "  not loadable   grpo (drivetrain-algo-grpo 1.0 does not import: "
        "ModuleNotFoundError: No module named 'missing_engine')",
    ]


def test_a_name_of_two_distributions_conflicts_until_one_is_picked(site: Site) -> None:
    site.add("acme-dapo")
    site.add("beta-dapo")
    registry = site.registry()
    rows = [row for row in registry.rows() if row.name == "dapo"]
    assert [(row.distribution, row.status, row.reason) for row in rows] == [
        ("acme-dapo", "conflict", "also offered by beta-dapo"),
        ("beta-dapo", "conflict", "also offered by acme-dapo"),
    ]
    assert message(site, "dapo").splitlines() == [
        "algorithm 'dapo' is offered by 2 distributions",
        "  pick one       acme-dapo:dapo",
        "  pick one       beta-dapo:dapo",
    ]
    assert registry.load("algorithms", "beta-dapo:dapo").__module__ == "beta_dapo.work"
    assert registry.load("algorithms", "Acme_Dapo:dapo").__module__ == "acme_dapo.work"
    assert "unknown algorithm 'gamma:dapo'" in message(site, "gamma:dapo")


def test_a_contract_of_another_version(site: Site) -> None:
    site.add("acme-dapo", GOOD.replace("name=", "contract_version=7, name="))
    registry = site.registry()
    (row,) = [row for row in registry.rows() if row.name == "dapo"]
    reason = "follows version 7 of the algorithm contract; this core drives 1"
    assert (row.status, row.reason) == ("skewed", reason)
    assert "dapo" not in registry.names("algorithms")
    assert message(site, "dapo").splitlines() == [
        f"algorithm 'dapo' cannot be used: acme-dapo 1.0 {reason}",
        "  install a version of acme-dapo that fits this core",
    ]
    assert f"not loadable   dapo (acme-dapo 1.0 {reason})" in message(site, "other")


@pytest.mark.parametrize(
    ("work", "cause"),
    [
        ("import missing_engine", ModuleNotFoundError),
        ("raise SystemExit('no licence')", SystemExit),
        ("class Other: ...", AttributeError),
    ],
)
def test_a_factory_that_does_not_import(site: Site, work: str, cause: type[BaseException]) -> None:
    site.add("acme-dapo", files={"work.py": work})
    registry = site.registry()
    assert "dapo" in registry.names("algorithms"), "listing imports no factory"
    with pytest.raises(PluginError, match="algorithm 'dapo' of acme-dapo 1.0 does not import: ") as raised:
        registry.load("algorithms", "dapo")
    assert isinstance(raised.value.__cause__, cause)


def test_a_config_model_that_does_not_import(site: Site) -> None:
    site.add("acme-dapo", GOOD.replace("name=", "config='{package}.gone:Config', name="))
    with pytest.raises(PluginError, match="acme-dapo 1.0 does not import: ModuleNotFoundError"):
        site.registry().config_model("algorithms", "dapo")


def test_resolve_looks_into_the_registry_of_the_process(site: Site, make_current) -> None:
    site.add("acme-dapo")
    make_current(site.registry())
    assert registry_module.resolve("algorithms", "dapo").__name__ == "Work"
    with pytest.raises(PluginError, match="unknown hybrid engine 'none'"):
        registry_module.resolve("hybrid_engines", "none")
