"""Properties that hold for any batch."""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain.protocol import DataProto, LocalHandle

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.int64,
    torch.int32,
    torch.uint8,
]


@st.composite
def batches(draw, handles=True, min_rows=0):
    rows = draw(st.integers(min_rows, 9))
    columns = {}
    for number, dtype in enumerate(draw(st.lists(st.sampled_from(DTYPES), max_size=4))):
        seed, shape = draw(st.integers(0, 99)), draw(st.sampled_from([(), (2,), (3, 1), (0,)]))
        values = torch.randint(0, 100, (rows, *shape), generator=torch.Generator().manual_seed(seed)).to(dtype)
        if dtype.is_floating_point:
            values[values > 80] = float("nan")
        columns[f"t{number}"] = LocalHandle(values) if handles and draw(st.booleans()) else values
    columns["numeric"] = np.arange(rows * 2).reshape(rows, 2) / 3
    columns["object"] = draw(st.lists(json_values, min_size=rows, max_size=rows))
    return DataProto.from_single_dict(columns, draw(st.dictionaries(st.text(max_size=3), json_values, max_size=3)))


def fetched(proto: DataProto) -> DataProto:
    return proto.with_columns(**{name: proto[name].clone() for name in proto.batch})


@quick
@given(batches(), st.data())
def test_chunk_split_concat(proto, data):
    whole = fetched(proto)
    if len(proto):
        count = data.draw(st.sampled_from([n for n in range(1, 10) if len(proto) % n == 0]))
        assert fetched(DataProto.concat(proto.chunk(count))).equal(whole)
        assert fetched(DataProto.concat(proto.split(data.draw(st.integers(1, 10))))).equal(whole)
    assert proto.equal(proto.select())


@quick
@given(batches(), st.randoms(use_true_random=False))
def test_reorder_and_its_inverse(proto, random):
    order = list(range(len(proto)))
    random.shuffle(order)
    there = proto.reorder(order)
    assert fetched(there).equal(fetched(proto)[order])
    assert fetched(there.reorder(np.argsort(order))).equal(fetched(proto))


@quick
@given(batches(), st.integers(1, 4))
def test_repeat_is_concat_up_to_order(proto, times):
    tiled = fetched(proto.repeat(times, interleave=False))
    assert tiled.equal(fetched(DataProto.concat([proto] * times)))
    order = np.arange(len(proto) * times).reshape(times, len(proto)).T.flatten()
    assert fetched(proto.repeat(times)).equal(tiled[order])


@quick
@given(batches(), st.data())
def test_pop_and_union_are_inverse(proto, data):
    before = proto.select()
    keys = data.draw(st.lists(st.sampled_from(proto.keys())))
    meta = data.draw(st.lists(st.sampled_from(list(proto.meta_info)))) if proto.meta_info else []
    popped = proto.pop(keys, meta)
    assert set(popped.keys()) == set(keys) and not set(proto.keys()) & set(keys)
    assert proto.union(popped).equal(before) and popped.union(proto).equal(before)


@quick
@given(batches(min_rows=1), st.integers(1, 12), st.booleans())
def test_pad_and_unpad(proto, multiple, with_mask):
    if with_mask:
        proto.batch["response_mask"] = torch.ones(len(proto), 2)
    before = fetched(proto)
    padded, added = proto.pad_to_multiple(multiple)
    assert len(padded) % multiple == 0 and added == len(padded) - len(proto) < multiple
    assert fetched(padded.unpad(added)).equal(before) and fetched(proto).equal(before)
    assert not with_mask or padded["response_mask"].sum() == 2 * len(proto)


@quick
@given(batches())
def test_save_and_load(proto):
    with tempfile.TemporaryDirectory() as folder:
        proto.save(f"{folder}/batch")
        assert DataProto.load(f"{folder}/batch").equal(fetched(proto))


@quick
@given(batches(handles=False, min_rows=1), st.data())
def test_union_finds_the_first_changed_row(proto, data):
    names = [name for name in proto.batch if proto[name].dim() == 2 and proto[name].shape[1] == 2]
    proto.batch["always"] = torch.zeros(len(proto), 2)
    name, row = data.draw(st.sampled_from([*names, "always"])), data.draw(st.integers(0, len(proto) - 1))
    changed = proto[name].clone()
    changed[row:, 1] = (changed[row:, 1].nan_to_num(0) == 0).to(changed.dtype)
    try:
        proto.union(proto.with_columns(**{name: changed}))
    except ValueError as error:
        assert f"column '{name}'" in str(error) and f"first at row {row}" in str(error)
    else:
        raise AssertionError("a changed row went unnoticed")


@quick
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.none() | st.integers(0, 9))
def test_mini_batches_keep_groups_and_cover_all_rows(data, batch_count, units, tied, seed):
    """Each loss_group ties `tied` prompts; `units` such groups fill a mini-batch."""
    prompts = batch_count * units * tied
    uids = [f"u{prompt}" for prompt in range(prompts) for _ in range(data.draw(st.integers(1, 3)))]
    uids = data.draw(st.permutations(uids))
    columns = {"row": torch.arange(len(uids)), "uid": uids}
    if tied > 1 or data.draw(st.booleans()):
        columns["loss_group"] = torch.tensor([int(uid[1:]) // tied for uid in uids])
    parts = list(DataProto.from_single_dict(columns).mini_batches(units * tied, seed=seed))
    assert len(parts) == batch_count
    assert sorted(row for part in parts for row in part["row"].tolist()) == list(range(len(uids)))
    for key in ("uid", "loss_group")[: len(columns) - 1]:
        groups = [set(part[key].tolist()) for part in parts]
        assert sum(map(len, groups)) == len(set.union(*groups))
    assert all(len(set(part["uid"])) == units * tied for part in parts)
