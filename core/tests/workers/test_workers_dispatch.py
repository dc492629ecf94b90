"""Dispatch of calls that are not cut by rows, as tables."""

from __future__ import annotations

import pytest
import torch
from dispatch_rig import execute, mesh

from drivetrain.builtin.dispatch import AllToAll, DPCompute, MeshMode, OneToAll, RankZero
from drivetrain.contracts.mesh import RankLayout
from drivetrain.protocol import DataProto


class PipelineFirst(MeshMode):
    split_axes = ()
    collect_axes = ("pp", "cp")


class OverContext(DPCompute):
    split_axes = collect_axes = ("dp", "cp")


# mode, layout, argument, what each executing rank gets, ranks whose results the caller gets (a number: that result)
TABLE = [
    (OneToAll, mesh(dp=1), "x", ["x"], 0),
    (OneToAll, mesh(dp=2, tp=2), "x", ["x"] * 4, [0, 1, 2, 3]),
    (OneToAll, [RankLayout()] * 3, "x", ["x"] * 3, [0, 1, 2]),  # replicas that know of no mesh
    (RankZero, mesh(dp=1), "x", ["x"], 0),
    (RankZero, mesh(pp=2, dp=2), "x", ["x"], 0),
    (AllToAll, mesh(dp=1), ["a"], ["a"], [0]),
    (AllToAll, mesh(dp=2, tp=2), ["a", "b", "c", "d"], ["a", "b", "c", "d"], [0, 1, 2, 3]),
    (AllToAll, mesh(dp=2)[::-1], ("a", "b"), ["a", "b"], [0, 1]),
    (DPCompute, mesh(dp=1), ["a"], ["a"], [0]),
    (DPCompute, mesh(dp=3), ["a", "b", "c"], ["a", "b", "c"], [0, 1, 2]),
    (DPCompute, mesh(dp=2, tp=2), ["a", "b"], ["a", "a", "b", "b"], [0, 2]),
    (DPCompute, mesh(tp=2, dp=2), ("a", "b"), ["a", "b", "a", "b"], [0, 1]),
    (DPCompute, mesh(pp=2, dp=2), ["a", "b"], ["a", "b", "a", "b"], [2, 3]),
    (DPCompute, mesh(dp=2, cp=2), ["a", "b"], ["a", "a", "b", "b"], [0, 2]),
    (DPCompute, mesh(pp=2, dp=1, cp=2, tp=2), ["a"], ["a"] * 8, [4]),
    (DPCompute, mesh(dp=2)[::-1], ["a", "b"], ["b", "a"], [1, 0]),  # ranks in another order than their indices
    (MeshMode, mesh(pp=2, dp=2), "x", ["x"] * 4, [2, 3]),
    (PipelineFirst, mesh(dp=2, pp=2, cp=2), "x", ["x"] * 8, [0, 1, 2, 3]),
    (OverContext, mesh(cp=2, dp=2, tp=2), list("abcd"), list("aaccbbdd"), [0, 4, 2, 6]),
]


@pytest.mark.parametrize("mode, layouts, argument, got, collected", TABLE)
def test_what_each_rank_gets_and_what_comes_back(mode, layouts, argument, got, collected) -> None:
    for args, kwargs in (((argument,), {}), ((), {"value": argument})):
        seen = []

        def method(rank, value, seen=seen):
            seen.append((rank, value))
            return rank

        result = execute(mode(), layouts, method, *args, **kwargs)
        assert seen == list(enumerate(got))
        assert result == collected


@pytest.mark.parametrize("mode", [DPCompute, AllToAll])
@pytest.mark.parametrize("value, said", [
    (["a"], "it is 1 elements"), (list("abc"), "it is 3 elements"), ("ab", "it is a str"), (None, "it is a NoneType"),
])  # fmt: skip
def test_arguments_of_the_wrong_length_are_refused_by_name(mode, value, said) -> None:
    for args, kwargs, name in (((["a", "b"], value), {}, "argument 1"), ((["a", "b"],), {"second": value}, "second")):
        with pytest.raises(ValueError, match=rf"^{name} must be a list of 2 elements, .*{said}"):
            mode().split(mesh(dp=2), args, kwargs)


@pytest.mark.parametrize("layouts", [
    mesh(dp=2)[:1], [*mesh(dp=2), *mesh(dp=2)], [RankLayout(dp_size=2), RankLayout(dp_size=2)],
    [RankLayout(dp=0, dp_size=2), RankLayout(dp=1, dp_size=1)],
])  # fmt: skip
def test_ranks_that_make_no_mesh_are_refused(layouts) -> None:
    with pytest.raises(ValueError, match="make no mesh"):
        DPCompute().split(layouts, (["a", "b"],), {})


@pytest.mark.parametrize("mode", [OneToAll, RankZero, AllToAll, DPCompute])
def test_a_rank_cannot_change_what_the_caller_holds(mode) -> None:
    def spoil(rank, batch, names, table):
        batch.batch["row"] = batch["row"] + 1
        batch.meta_info["mine"] = 1
        names.append("more")
        table["more"] = 1

    batch, names, table = DataProto.from_dict({"row": torch.arange(3)}), ["a"], {"b": 1}
    lists = mode in (AllToAll, DPCompute)
    execute(mode(), mesh(dp=1), spoil, *([value] if lists else value for value in (batch, names, table)))
    assert batch.equal(DataProto.from_dict({"row": torch.arange(3)})) and names == ["a"] and table == {"b": 1}
