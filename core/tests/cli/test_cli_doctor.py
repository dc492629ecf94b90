"""``drivetrain doctor``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from little_distributions import Site

CHIP = """
    from drivetrain import HardwareSpec, hookimpl

    @hookimpl
    def drivetrain_hardware():
        yield HardwareSpec(name="chip", summary="", factory="{package}.work:Chip", config="{package}.work:ChipConfig")
"""
WORK = """
    from drivetrain import Component, PluginConfig
    from drivetrain.builtin.cpu import CPU

    class ChipConfig(PluginConfig):
        spare: bool = {spare}

    class Chip(CPU):
        @classmethod
        def detect(cls):
            return 2

        @classmethod
        def components(cls):
            return [Component(name="chip driver", found={driver}, minimum="7.1", mend="update it"),
                    Component(name="chip firmware", found=None)]

        def device_name(self, local_index=None):
            return "Chip 9" if self.config.spare else 1 / 0
"""


def add_chip(site: Site, works: bool, driver: str = "'7.2'") -> None:
    work = WORK.replace("{spare}", str(works)).replace("{driver}", driver)
    site.add("acme-chip", CHIP, files={"work.py": work})


def report(program: Any, capsys: pytest.CaptureFixture[str], code: int) -> dict[str, Any]:
    assert program("doctor", "--json") == code
    return json.loads(capsys.readouterr().out)


def test_what_is_there(program, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    add_chip(site, works=True)
    found = report(program, capsys, 0)
    assert found.keys() == {"drivetrain", "python", "platform", "engines", "hardware", "not_loadable"}
    assert found["engines"]["torch"] and found["not_loadable"] == []
    rows = {row["name"]: row for row in found["hardware"]}
    assert rows.keys() == {"cpu", "chip"} and rows["cpu"]["devices"].startswith("1 x ")
    assert rows["chip"]["devices"].startswith("2 x Chip 9, ") and rows["chip"]["problem"] == ""


def test_what_cannot_be_used(program, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    add_chip(site, works=False)
    site.add("acme-broken", "import missing_engine")
    found = report(program, capsys, 1)
    assert [row["problem"].split(":")[0] for row in found["hardware"] if row["problem"]] == ["ZeroDivisionError"]
    assert [(row["distribution"], row["status"]) for row in found["not_loadable"]] == [("acme-broken", "broken")]
    assert program("doctor") == 1
    out = capsys.readouterr().out
    assert "missing_engine" in out and "ZeroDivisionError" in out and out.endswith("something is not usable\n")


def test_a_component_below_its_minimum(program, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    add_chip(site, works=True, driver="'7.0.9-rc'")
    chip = next(row for row in report(program, capsys, 1)["hardware"] if row["name"] == "chip")
    assert chip["problem"] == "" and chip["devices"].startswith("2 x Chip 9, ")
    assert [(part["name"], part["problem"]) for part in chip["components"]] == [
        ("chip driver", "7.1 or newer is needed"), ("chip firmware", ""),
    ]  # fmt: skip
    assert program("doctor") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "    chip driver        7.0.9-rc   7.1 or newer is needed: update it" in lines
    assert "    chip firmware      no version" in lines and lines[-1] == "something is not usable"


def test_a_component_that_cannot_be_read(program, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    add_chip(site, works=True, driver="None")
    assert program("doctor") == 1
    told = "    chip driver        no version   no version can be read; 7.1 or newer is needed: update it"
    assert told in capsys.readouterr().out.splitlines()


def test_hardware_that_is_not_there_is_no_problem(program, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    absent = WORK.replace("return 2", "return 0").replace("{spare}", "False").replace("{driver}", "'7.1'")
    site.add("acme-chip", CHIP, files={"work.py": absent})
    assert program("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  chip                 not detected" in lines and "    chip driver        7.1   (7.1 or newer)" in lines
