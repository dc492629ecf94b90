"""Dispatch of batches: which rows each rank gets, and what the caller gets back."""

from __future__ import annotations

import math

import pytest
import torch
from dispatch_rig import execute, mesh
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.builtin.row_dispatch import DPComputeMetric, DPComputeProto, DPComputeProtoWithFunc
from drivetrain.contracts.algorithm import LossTerm
from drivetrain.metrics import Max, Mean, Sum
from drivetrain.numerics import Counts
from drivetrain.protocol import ColumnHandle, DataProto
from drivetrain.seam.registry import get_registry
from drivetrain.seam.specs import PolicyLossSpec


def rows(lengths, **columns) -> DataProto:
    """Rows with so many tokens; with ``None`` for them, without attention_mask."""
    count = lengths if isinstance(lengths, int) else len(lengths)
    batch = {"row": torch.arange(count), "name": [f"n{row}" for row in range(count)], **columns}
    if not isinstance(lengths, int):
        batch["attention_mask"] = (torch.arange(12) < torch.tensor(lengths).reshape(-1, 1)).long()
    return DataProto.from_single_dict(batch, {"temperature": 0.5})


def seen_rows(mode, layouts, batch, times=1, **others):
    """The rows that each rank gets, in order of ranks, and what the caller gets back."""
    seen = []

    def method(rank, batch, **others):
        seen.append(batch["row"].tolist())
        repeated = batch.select(["row"]).repeat(times)
        return repeated.with_columns(double=repeated["row"] * 2, rank=torch.full((len(repeated),), rank))

    whole = execute(mode, layouts, method, batch=batch, **others)
    return seen, whole


PAIRS = ["a", None, "b", "a", "b", None]
# layout, lengths of rows (or their number), labels of loss_group, rows that each rank gets (fillers after |)
TABLE = [
    (mesh(dp=1), 3, None, ["0 1 2"]),
    (mesh(dp=2), 4, None, ["0 1", "2 3"]),
    (mesh(dp=3), 7, None, ["0 1 2", "3 4 | 0", "5 6 | 0"]),
    (mesh(dp=3), 2, None, ["0", "1", "| 0"]),
    (mesh(dp=3), 0, None, ["", "", ""]),
    (mesh(dp=3), [], None, ["", "", ""]),
    (mesh(dp=2), [9, 1, 1, 9], None, ["0 2", "1 3"]),
    (mesh(dp=2), [9, 9, 1, 1], None, ["0 3", "1 2"]),
    (mesh(dp=2), [9, 2, 3, 4, 1], None, ["0 1 4", "2 3 | 4"]),
    (mesh(dp=2, tp=2), [9, 9, 1, 1], None, ["0 3", "0 3", "1 2", "1 2"]),
    (mesh(pp=2, dp=2, cp=2), 4, None, ["0 1", "0 1", "2 3", "2 3"] * 2),
    (mesh(dp=2)[::-1], 3, None, ["2 | 0", "0 1"]),  # ranks in another order than their indices
    (mesh(dp=2), 6, PAIRS, ["0 1 3", "2 4 5"]),
    (mesh(dp=2), [1, 9, 5, 1, 5, 2], PAIRS, ["0 1 3", "2 4 5"]),
    (mesh(dp=4), [1, 9, 5, 1, 5, 2], PAIRS, ["0 3", "1 | 0", "2 4", "5 | 0"]),
]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("layouts, lengths, groups, parts", TABLE)
def test_batches_go_in_parts_and_come_back_in_order(layouts, lengths, groups, parts, times) -> None:
    batch = rows(lengths) if groups is None else rows(lengths, loss_group=groups)
    seen, whole = seen_rows(DPComputeProto(), layouts, batch, times)
    assert seen == [[int(row) for row in part.replace("|", "").split()] for part in parts]
    assert whole["row"].tolist() == [row for row in range(len(batch)) for _ in range(times)]
    assert whole["double"].tolist() == [2 * row for row in whole["row"].tolist()]
    pp_last = [layout.tp == 0 and layout.cp == 0 and layout.pp == layout.pp_size - 1 for layout in layouts]
    assert all(pp_last[rank] for rank in whole["rank"].tolist())
    assert "is_padding" not in whole


def test_padding_repeats_the_shortest_row_in_a_copy_and_is_marked() -> None:
    batch = rows([3, 1, 4, 2, 5], response_mask=torch.ones(5, 2))
    calls = DPComputeProto().split(mesh(dp=2), (batch, "same"), {"again": batch})
    marks = {tuple(zip(args[0]["row"].tolist(), args[0]["is_padding"].tolist())) for args, _ in calls}
    assert sum(mark for part in marks for _, mark in part) == 1
    assert all(row == 1 for part in marks for row, mark in part if mark)
    assert all(args[1] == "same" and kwargs["again"].equal(args[0]) for args, kwargs in calls)
    assert "is_padding" not in batch and all(args[0].meta_info == batch.meta_info for args, _ in calls)
    [(args, _), _] = DPComputeProto().split(mesh(dp=2), (batch[:4],), {})
    assert "is_padding" not in args[0]


def test_padding_that_the_caller_made_is_the_callers() -> None:
    padded, _ = rows(5).pad_to_multiple(7)
    whole = execute(DPComputeProto(), mesh(dp=2), lambda rank, batch: batch, padded)
    assert whole.equal(padded)


def test_batches_of_one_call_have_the_same_rows() -> None:
    for args, kwargs, said in (
        ((rows(4), 1, rows(3)), {}, "argument 2 has 3 rows, argument 0 has 4"),
        ((), {"batch": rows(4), "other": rows(0)}, "other has 0 rows, batch has 4"),
    ):
        for mode in (DPComputeProto, DPComputeMetric):
            with pytest.raises(ValueError, match=said):
                mode().split(mesh(dp=2), args, kwargs)


@pytest.mark.parametrize("method, error, said", [
    (lambda rank, batch: batch[: 1 + rank], ValueError, r"parts of \[2, 2\] rows gave \[1, 2\]"),
    (lambda rank, batch: batch[:0] if rank else batch, ValueError, r"parts of \[2, 2\] rows gave \[2, 0\]"),
    (lambda rank, batch: None if rank else batch, TypeError, "part 1 returned a NoneType"),
    (lambda rank, batch: [batch], TypeError, "part 0 returned a list"),
])  # fmt: skip
def test_results_that_do_not_fit_the_rows_are_refused(method, error, said) -> None:
    with pytest.raises(error, match=said):
        execute(DPComputeProto(), mesh(dp=2), method, rows(4))


def test_a_method_may_return_nothing_and_need_no_batch() -> None:
    assert execute(DPComputeProto(), mesh(dp=2), lambda rank, batch: None, rows(3)) is None
    whole = execute(DPComputeProto(), mesh(dp=2), lambda rank, n: rows(n)[:rank], 4)
    assert whole["row"].tolist() == [0]


def test_a_function_goes_to_every_rank() -> None:
    def method(rank, function, batch):
        return function(batch)

    result = execute(DPComputeProtoWithFunc(), mesh(dp=2, tp=2), method,
                     lambda batch: batch.with_columns(row=batch["row"] + 1), rows([4, 1, 2]))  # fmt: skip
    assert result["row"].tolist() == [1, 2, 3]
    for args, kwargs in (((rows(2), len), {}), ((), {"function": None, "batch": rows(2)}), ((), {})):
        with pytest.raises(ValueError, match=r"^(argument 0|function|the first argument) must be a function"):
            DPComputeProtoWithFunc().split(mesh(dp=2), args, kwargs)


class Forbidden(ColumnHandle):
    """A column that must not be read."""

    def __init__(self, rows: int) -> None:
        super().__init__("forbidden", (rows, 2), torch.float32)

    def read(self) -> torch.Tensor:
        raise AssertionError("this column was fetched")


@pytest.mark.parametrize("mode", [DPComputeProto, DPComputeMetric])
def test_columns_that_lie_elsewhere_are_not_fetched(mode) -> None:
    batch = rows([3, 1, 2], far=Forbidden(3), response_mask=Forbidden(3))
    calls = mode().split(mesh(dp=2), (batch,), {})
    assert {type(args[0].stored["far"]).__name__ for args, _ in calls} == {"RowView"}
    if mode is DPComputeProto:
        assert execute(mode(), mesh(dp=2), lambda rank, batch: batch, batch)["row"].tolist() == [0, 1, 2]


# -- metrics -----------------------------------------------------------------------------------------------------------


def offered(monkeypatch: pytest.MonkeyPatch, **scopes: str) -> None:
    registry = get_registry()
    specs = {n: PolicyLossSpec(name=n, summary="", factory="m:f", scope=scope) for n, scope in scopes.items()}  # type: ignore[arg-type]
    select = registry.select
    fake = {name: type("Offer", (), {"spec": spec}) for name, spec in specs.items()}
    monkeypatch.setattr(type(registry), "select", lambda self, hook, name: fake.get(name) or select(hook, name))


UIDS = ["p", "q", "p", "q", "p", "q"]


@pytest.mark.parametrize("names, together", [
    ([], True), (["by_token"], False), (["by_row", "by_token"], False), (["by_token", "by_group"], True),
    (["whole"], True),
])  # fmt: skip
def test_rows_of_a_prompt_are_together_if_a_term_needs_them(names, together, monkeypatch) -> None:
    offered(monkeypatch, by_token="token", by_row="sequence", by_group="group", whole="batch")
    terms = [LossTerm(name) for name in names]
    for lengths in (6, [9, 9, 1, 1, 1, 1]):
        calls = DPComputeMetric().split(mesh(dp=2), (), {"batch": rows(lengths, uid=UIDS), "terms": terms})
        parts = [sorted(set(kwargs["batch"]["uid"].tolist())) for _, kwargs in calls]
        assert (parts == [["p"], ["q"]]) is together
        assert all(kwargs["terms"] == terms for _, kwargs in calls)


def test_nothing_is_padded_and_metrics_are_merged_over_data_parallel_indices() -> None:
    layouts = mesh(dp=4, tp=2)
    batch = rows([9, 2, 2, 2, 9], uid=["p", "q", "q", "q", "r"])
    seen: dict[int, list[int]] = {}

    def method(rank, batch):
        seen[rank] = batch["row"].tolist()
        own = {"rows": Sum(float(len(batch))), "rank": Max(rank), "mean": Mean(batch["row"].sum(), len(batch))}
        return own if len(batch) else {"rank": Max(rank)}

    merged = execute(DPComputeMetric(), layouts, method, batch)
    assert list(seen.values()) == [[0], [0], [1, 2, 3], [1, 2, 3], [4], [4], [], []]
    assert {name: metric.result() for name, metric in merged.items()} == {"rows": 5.0, "rank": 6.0, "mean": 2.0}


def test_a_padded_batch_is_not_learned_from() -> None:
    padded, _ = rows(3).pad_to_multiple(2)
    for layouts in (mesh(dp=1), mesh(dp=2)):
        with pytest.raises(ValueError, match="batch is padded"):
            DPComputeMetric().split(layouts, (), {"batch": padded})


# -- what holds for any batch and any mesh -----------------------------------------------------------------------------

quick = settings(max_examples=60, deadline=None)
MESHES = st.permutations(["dp", "tp", "pp", "cp"]).flatmap(
    lambda axes: st.lists(st.integers(1, 3), min_size=4, max_size=4).map(lambda sizes: mesh(**dict(zip(axes, sizes))))
)


@st.composite
def batches(draw):
    count = draw(st.integers(0, 9))
    labels = st.lists(st.sampled_from([None, "a", "b", 1]), min_size=count, max_size=count)
    lengths = draw(st.just(count) | st.lists(st.integers(1, 12), min_size=count, max_size=count))
    columns = {"uid": draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))}
    if draw(st.booleans()):
        columns["loss_group"] = draw(labels)
    value = torch.rand(count, 3, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    return rows(lengths, value=value, response_mask=(value > 0.3).long(), **columns)


def copied(batch: DataProto) -> DataProto:
    return batch.with_columns(**{name: batch[name].clone() for name in batch.batch})


@quick
@given(MESHES, batches(), st.integers(0, 3))
def test_compute_is_the_same_on_any_mesh(layouts, batch, times) -> None:
    def method(rank, batch):
        out = batch.repeat(times).with_columns(value=batch.repeat(times)["value"] * 3)
        batch.batch["value"] = batch["value"] + 1  # its own batch, as a worker may
        batch.meta_info["rank"] = rank
        return out.select(meta_info_keys=["temperature"])

    before, parts = copied(batch), []
    whole = execute(DPComputeProto(), layouts, lambda rank, batch: parts.append(batch) or method(rank, batch), batch)
    assert whole.equal(method(0, before[:])) and batch.equal(before)
    assert len({len(part) for part in parts}) == 1
    if "loss_group" not in batch:
        assert len(parts[0]) == math.ceil(len(batch) / layouts[0].dp_size)


@quick
@given(MESHES, batches(), st.booleans())
def test_what_is_learned_is_the_same_on_any_mesh(layouts, batch, with_terms) -> None:
    """A loss that is divided by global counts is summed over parts; so is its gradient."""
    weight = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    counts = Counts.of(batch["response_mask"])

    def update(rank, batch, terms, counts):
        own = weight.clone().requires_grad_()
        loss = ((batch["value"] * own).sin() * batch["response_mask"]).sum() / max(1, counts.tokens)
        loss.backward()
        metrics = {f"grad{i}": Sum(g) for i, g in enumerate(own.grad)}
        return metrics | {"loss": Sum(loss), "rows": Sum(len(batch)), "value": Mean(batch["value"].sum(), len(batch))}

    before, parts = copied(batch), []
    terms = [LossTerm("clip")] if with_terms else []
    merged = execute(DPComputeMetric(), layouts, lambda rank, batch, *a: parts.append(batch) or update(rank, batch, *a),
                     batch, terms, counts)  # fmt: skip
    alone = update(0, before, terms, counts)
    assert {n: m.result() for n, m in merged.items()} == pytest.approx({n: m.result() for n, m in alone.items()})
    assert batch.equal(before) and not any("is_padding" in part for part in parts)
    distinct = {tuple(part["row"].tolist()): part for part in parts if len(part)}.values()
    assert sorted(row for part in distinct for row in part["row"].tolist()) == list(range(len(batch)))
    for name in ("loss_group",) if with_terms else ("loss_group", "uid"):
        labels = [label for part in distinct if name in part for label in set(part[name].tolist()) - {None}]
        assert len(labels) == len(set(labels))
