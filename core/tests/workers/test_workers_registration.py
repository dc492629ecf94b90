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
from drivetrain.workers import ActorRolloutRefWorker, Execute, dispatch_call, register, registration

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

    @register("DP_COMPUTE_PROTO", mesh="rollout", execute_mode="RANK_ZERO", blocking=False)
    def alone(self, batch: DataProto, **options: Any) -> DataProto:
        return batch

    @register("all_to_all", mesh="rollout")
    def plus(self, first: int, /, *others: int) -> int:
        return first + sum(others)

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


def test_how_and_where_a_method_executes() -> None:
    usual, alone = registration(Doubler, "double"), registration(Doubler, "alone")
    assert (usual.execute_mode, usual.blocking) == (Execute.ALL, True)
    assert (alone.execute_mode, alone.blocking, alone.dispatch_mode) == (Execute.RANK_ZERO, False, "dp_compute_proto")
    with pytest.raises(ValueError, match="some"):
        register(execute_mode="some")


PAIR = [RankLayout(dp=rank, dp_size=2) for rank in range(2)]


def test_arguments_reach_a_mode_by_name_however_they_were_given() -> None:
    for args, kwargs in (((rows(), 3), {}), ((rows(),), {"factor": 3}), ((), {"factor": 3, "batch": rows()})):
        call = dispatch_call(Doubler, "double", PAIR, args, kwargs)
        assert call.ranks == [0, 1] and [args for args, _ in call.calls] == [(), ()]
        assert [(k["batch"]["row"].tolist(), k["factor"]) for _, k in call.calls] == [([0, 1], 3), ([2, 0], 3)]
        assert call.collect([Doubler().double(**k) for _, k in call.calls])["row"].tolist() == [0, 3, 6]
    call = dispatch_call(Doubler, "plus", PAIR, ([1, 2], [3, 4], [5, 6]), {})
    assert [Doubler().plus(*args) for args, _ in call.calls] == [9, 12]


def test_a_call_of_rank_zero_goes_whole_to_that_rank() -> None:
    call = dispatch_call(Doubler, "alone", PAIR, (rows(),), {"more": 1})
    [((), kwargs)] = call.calls
    assert call.ranks == [0] and kwargs["batch"].equal(rows()) and kwargs["more"] == 1
    assert call.collect([rows()]).equal(rows())


@pytest.mark.parametrize("method, args, kwargs, error, said", [
    ("double", (), {}, TypeError, "Doubler.double: missing a required argument: 'batch'"),
    ("double", (rows(),), {"batch": rows()}, TypeError, "Doubler.double: multiple values for argument 'batch'"),
    ("plus", ([1, 2], 3), {}, ValueError, "Doubler.plus: argument 1 must be a list of 2 elements"),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_refused_by_name(method, args, kwargs, error, said) -> None:
    with pytest.raises(error, match=said):
        dispatch_call(Doubler, method, PAIR, args, kwargs)


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
