from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from pydantic import ValidationError

from drivetrain import CommandSpec, PluginConfig, Tracker, TrackerSpec
from drivetrain_report import plugin
from drivetrain_report.command import report
from drivetrain_report.config import ConsoleConfig


def resolve(path):
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def test_offers_can_be_imported():
    for spec in plugin.drivetrain_trackers():
        assert isinstance(spec, TrackerSpec)
        assert issubclass(resolve(spec.factory), Tracker)
        config = resolve(spec.config)
        assert issubclass(config, PluginConfig)
        resolve(spec.factory)(config(name=spec.name))
    for spec in plugin.drivetrain_commands():
        assert isinstance(spec, CommandSpec)
        assert callable(resolve(spec.factory))


def test_listing_imports_nothing_heavy():
    code = (
        "import sys, drivetrain_report.plugin, drivetrain_report.config, drivetrain_report.command;"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_keys_are_refused():
    with pytest.raises(ValidationError):
        ConsoleConfig(name="console", colour="red")


def test_command_says_where_the_page_is(capsys, tmp_path, rows, write_lines):
    write_lines(tmp_path / "metrics.jsonl", rows(2))
    report(tmp_path)
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
