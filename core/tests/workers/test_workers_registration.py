"""What of a worker can be called from the driver, and the group of one worker in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.builtin.local_executor import LocalExecutor, LocalWorkerGroup
from drivetrain.contracts.mesh import RankLayout
from drivetrain.contracts.placement import GroupPlan
from drivetrain.metrics import Sum
from drivetrain.protocol import DataProto
from drivetrain.workers import ActorRolloutRefWorker, register, registration

CLOSED: list[str] = []


class Doubler:
    def __init__(self, run: Any = None, role: str = "") -> None:
        self.role = role

    def layout(self, mesh: str) -> RankLayout:
        assert mesh == "rollout"
        return RankLayout()

    @register("dp_compute_proto", mesh="rollout")
    def double(self, batch: DataProto, factor: int = 2) -> DataProto:
        return batch.with_columns(row=batch["row"] * factor)

    @register("dp_compute_metric", mesh="rollout")
    def measure(self, batch: DataProto) -> dict[str, Sum]:
        return {"rows": Sum(len(batch))}

    @register(mesh="rollout")
    def name(self) -> str:
        return self.role

    def private(self) -> None: ...

    def close(self) -> None:
        CLOSED.append(self.role)


def rows() -> DataProto:
    return DataProto.from_dict({"row": torch.arange(3)})


def test_calls_reach_the_worker_by_position_and_by_name() -> None:
    group, batch = LocalWorkerGroup(Doubler()), rows()
    by_position, by_name = group.call("double", batch, 3), group.call("double", factor=3, batch=batch)
    assert by_position["row"].tolist() == [0, 3, 6] and by_position.equal(by_name)
    assert batch.equal(rows())
    assert group.call("measure", batch) == {"rows": Sum(3)}


def test_registration_says_how_a_method_is_called() -> None:
    found = registration(Doubler, "measure")
    assert (found.dispatch_mode, found.mesh) == ("dp_compute_metric", "rollout")
    assert registration(Doubler, "name").dispatch_mode == "one_to_all"
    assert registration(ActorRolloutRefWorker, "generate_sequences").mesh == "rollout"


@pytest.mark.parametrize("method, said", [("private", "Doubler.private is not registered"), ("gone", "gone")])
def test_other_methods_cannot_be_called(method: str, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        LocalWorkerGroup(Doubler()).call(method)


def test_the_local_executor_starts_and_closes_groups() -> None:
    executor = LocalExecutor(None)
    executor.shutdown()  # before anything was started
    plans = [GroupPlan(name=f"g{n}", worker=f"{__name__}:Doubler", roles=("a", f"b{n}")) for n in range(2)]
    groups = executor.start(plans, None)
    assert [groups[f"g{n}"].call("name") for n in range(2)] == ["a_b0", "a_b1"]
    assert groups["g0"].world_size == 1
    for _ in range(2):
        executor.shutdown()
    assert CLOSED == ["a_b0", "a_b1"]
