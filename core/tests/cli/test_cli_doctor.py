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
    from drivetrain import PluginConfig
    from drivetrain.builtin.cpu import CPU

    class ChipConfig(PluginConfig):
        spare: bool = {spare}

    class Chip(CPU):
        @classmethod
        def detect(cls):
            return 2

        def device_name(self, local_index=0):
            return "Chip 9" if self.config.spare else 1 / 0
"""


def add_chip(site: Site, works: bool) -> None:
    site.add("acme-chip", CHIP, files={"work.py": WORK.replace("{spare}", str(works))})


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
