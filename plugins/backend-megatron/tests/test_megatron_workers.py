"""Names that Megatron's users know, in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

import drivetrain_backend_megatron
from drivetrain import UserError


def test_public_names_are_imported_on_use() -> None:
    code = ("import sys, drivetrain_backend_megatron as ours; assert ours.Family.__name__ == 'Family'; dir(ours)\n"
            "print({'torch', 'ray', 'megatron'} & set(sys.modules))")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"
    with pytest.raises(AttributeError, match="no attribute 'MegatronWrker'"):
        drivetrain_backend_megatron.MegatronWrker  # noqa: B018


def test_a_group_on_ray_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "drivetrain_executor_ray", None)
    monkeypatch.delitem(sys.modules, "drivetrain_backend_megatron.ray_groups", raising=False)
    with pytest.raises(UserError, match=r"drivetrain-backend-megatron\[ray\]"):
        drivetrain_backend_megatron.MegatronRayWorkerGroup  # noqa: B018
