"""Megatron's dispatch modes: what each rank gets, and whose results come back."""

from __future__ import annotations

import itertools

import pytest
import torch

from drivetrain import DataProto, RankLayout, resolve


def mesh(**sizes: int) -> list[RankLayout]:
    """The layouts of all ranks, the last axis named running fastest."""
    places = itertools.product(*(range(size) for size in sizes.values()))
    total = {f"{axis}_size": size for axis, size in sizes.items()}
    return [RankLayout(**dict(zip(sizes, place)), **total) for place in places]


def call(name: str, layouts: list[RankLayout], value):
    """What each rank gets, and the numbers of the ranks whose results come back."""
    mode = resolve("dispatch_modes", name)()
    calls = mode.split(layouts, (), {"value": value})
    got = [kwargs["value"] for _, kwargs in calls]
    if name.endswith("_proto"):
        outputs = [part.with_columns(rank=torch.full((len(part),), rank)) for rank, part in enumerate(got)]
        return [part["row"].tolist() for part in got], mode.collect(layouts, outputs)
    return got, mode.collect(layouts, list(range(len(layouts))))


MEGATRON = mesh(pp=2, dp=2, cp=2, tp=2)  # Megatron's default order of ranks: tp fastest, pp slowest
# name, layout, elements, what each rank gets, ranks that come back
LISTS = [
    ("megatron_compute", mesh(dp=1), "A", "A", [0]),
    ("megatron_compute", mesh(dp=2, tp=2), "AB", "AABB", [0, 2]),
    ("megatron_compute", mesh(pp=3, tp=2), "A", "AAAAAA", [4]),
    ("megatron_compute", MEGATRON, "AB", "AAAABBBB" * 2, [8, 12]),
    ("megatron_pp_as_dp", mesh(dp=1), "A", "A", [0]),
    ("megatron_pp_as_dp", mesh(pp=2, dp=4), "ABCDEFGH", "ACEGBDFH", [0, 4, 1, 5, 2, 6, 3, 7]),
    ("megatron_pp_as_dp", MEGATRON, "ABCD", "AAAACCCCBBBBDDDD", [0, 8, 4, 12]),
]


@pytest.mark.parametrize("name, layouts, elements, got, collected", LISTS)
def test_lists(name, layouts, elements, got, collected) -> None:
    assert call(name, layouts, list(elements)) == (list(got), collected)


@pytest.mark.parametrize("name, layouts, elements, got, collected", LISTS)
def test_batches(name, layouts, elements, got, collected) -> None:
    """As lists whose elements are rows, two of each."""
    batch = DataProto.from_dict({"row": torch.arange(2 * len(elements))})
    parts, whole = call(f"{name}_proto", layouts, batch)
    assert parts == [[2 * elements.index(e), 2 * elements.index(e) + 1] for e in got]
    assert whole["row"].tolist() == batch["row"].tolist()
    assert whole["rank"].tolist() == [rank for rank in collected for _ in range(2)]


@pytest.mark.parametrize("name, parts", [("megatron_compute_proto", 2), ("megatron_pp_as_dp_proto", 4)])
def test_batches_that_do_not_divide_are_padded_and_trimmed(name, parts) -> None:
    lengths = torch.tensor([3, 9, 1, 4, 7])
    batch = DataProto.from_dict({"row": torch.arange(5), "attention_mask": (torch.arange(9) < lengths[:, None]).long()})
    got, whole = call(name, MEGATRON, batch)
    assert {len(part) for part in got} == {-(-5 // parts)} and len({tuple(part) for part in got}) == parts
    assert whole["row"].tolist() == [0, 1, 2, 3, 4] and "is_padding" not in whole


@pytest.mark.parametrize("name, elements", [("megatron_compute", "ABC"), ("megatron_pp_as_dp", "AB")])
def test_lists_of_another_length_are_refused_by_name(name, elements) -> None:
    with pytest.raises(ValueError, match="^value must be a list of"):
        call(name, MEGATRON, list(elements))


@pytest.mark.parametrize("layouts, collected", [(mesh(dp=1), [0]), (mesh(dp=2, pp=3), [0, 1, 2]), (MEGATRON, [0, 8])])
def test_pipeline_stages_alone_answer(layouts, collected) -> None:
    assert call("megatron_pp_only", layouts, "same") == (["same"] * len(layouts), collected)
