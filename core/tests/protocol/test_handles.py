"""Columns by reference: what stays lazy, what is read, and when two are the same."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from drivetrain.protocol import ColumnHandle, DataProto, LocalHandle, check_columns


class Counted(ColumnHandle):
    """A column that counts how often it is read."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        super().__init__(name, tensor.shape, tensor.dtype)
        self.tensor, self.reads = tensor, 0

    def read(self) -> Tensor:
        self.reads += 1
        return self.tensor


@pytest.fixture
def x():
    return Counted("x", torch.arange(24.0).view(8, 3))


@pytest.fixture
def y():
    return Counted("y", torch.arange(8))


@pytest.fixture
def batch(x, y):
    return DataProto.from_single_dict({"x": x, "y": y, "here": torch.zeros(8), "uid": list("aabbccdd")})


def test_every_method_that_moves_columns_reads_none(batch, x, y):
    moved = batch.select(["x", "y", "here"])
    moved = moved.union(moved.pop(["x"])).union(batch)
    moved = DataProto.concat(moved.reorder(torch.randperm(8)).chunk(4)).repeat(2)
    moved = DataProto.concat([*moved.split(3), moved[5], moved[torch.arange(16) % 3 == 0]])
    moved = moved.rename({"y": "z"}).with_columns(new=torch.zeros(len(moved)))
    moved = next(moved.mini_batches(2, seed=0)).pad_to_multiple(100)[0]
    assert moved.equal(moved.select()) and repr(moved) and len(moved) == 100
    check_columns(moved, ["x"])
    assert (x.reads, y.reads) == (0, 0)
    assert isinstance(moved.stored["x"], ColumnHandle)


def test_touching_a_column_reads_it_alone_and_once(batch, x, y):
    parts = batch.reorder([7, 6, 5, 4, 3, 2, 1, 0]).chunk(2)
    assert parts[0]["x"].tolist() == x.tensor[[7, 6, 5, 4]].tolist()
    assert parts[1].batch["x"].tolist() == x.tensor[[3, 2, 1, 0]].tolist()
    assert torch.equal(batch["x"], x.tensor)
    assert parts[0]["x"] is parts[0]["x"]
    assert (x.reads, y.reads) == (1, 0)
    assert set(batch.batch.tensordict().keys()) == {"x", "y", "here"} and (x.reads, y.reads) == (1, 1)


def test_setting_a_column_replaces_the_handle(batch, x):
    batch.batch["x"] = torch.ones(8)
    assert batch["x"].sum() == 8 and x.reads == 0 and len(batch.batch) == 3
    batch.batch["here"] = x
    assert batch["here"] is x.tensor and list(batch.batch).count("here") == 1
    with pytest.raises(ValueError, match="'odd' has 4 rows"):
        batch.batch["odd"] = batch[:4].stored["x"]


def test_union_goes_by_identity(batch, x):
    again = Counted("x", torch.full((8, 3), -1.0))
    assert batch.union(DataProto({"x": again})).stored["x"] is x
    with pytest.raises(ValueError, match=r"column 'x' differs .* refer to x and other"):
        batch.union(DataProto({"x": Counted("other", x.tensor)}))
    assert x.reads == 0 and again.reads == 0
    batch.union(DataProto({"x": x.tensor.clone()}))
    with pytest.raises(ValueError, match="first at row 0"):
        batch.union(DataProto({"x": x.tensor + 1}))
    assert x.reads == 1


def test_identity_follows_the_rows(x):
    proto = DataProto({"x": x})
    order = np.random.default_rng(0).permutation(8)
    assert proto.reorder(order).union(proto.reorder(order)).equal(proto.reorder(order))
    assert proto[:4].union(proto[[0, 1, 2, 3]]).equal(proto[torch.arange(8) < 4])
    with pytest.raises(ValueError, match="they refer to"):
        proto.union(proto.reorder(order))
    whole = [proto[:], proto.reorder(range(8)), *proto.chunk(1), proto.repeat(1), DataProto.concat([proto])]
    assert all(other.stored["x"] is x for other in whole) and x.reads == 0


def test_concat_of_other_sources_and_with_tensors(x):
    z = Counted("z", torch.zeros(2, 3))
    joined = DataProto.concat([DataProto({"x": x}), DataProto({"x": z})])
    handle = joined.stored["x"]
    assert isinstance(handle, ColumnHandle) and handle.shape == (10, 3) and (x.reads, z.reads) == (0, 0)
    assert torch.equal(joined[[0, 9]]["x"], torch.stack([x.tensor[0], z.tensor[1]]))
    with_tensor = DataProto.concat([DataProto({"x": z}), DataProto({"x": torch.ones(1, 3)})])
    assert with_tensor["x"].sum() == 3
    with pytest.raises(ValueError, match=r"column 'x' is torch.float32"):
        DataProto.concat([DataProto({"x": x}), DataProto({"x": Counted("i", torch.zeros(2, 3).long())})])


def test_a_chunk_of_joined_columns_reads_only_its_part():
    sources = [Counted(f"part{number}", torch.arange(4) + 10 * number) for number in range(3)]
    whole = DataProto.concat([DataProto({"x": source}) for source in sources])
    assert whole[[5, 4, 6]]["x"].tolist() == [11, 10, 12] and [s.reads for s in sources] == [0, 1, 0]
    order = np.random.default_rng(1).permutation(12)
    mixed = DataProto.concat(whole.reorder(order).split(5))
    assert mixed["x"].tolist() == torch.cat([s.tensor for s in sources])[order].tolist()
    assert mixed.reorder(np.argsort(order))["x"].tolist() == whole["x"].tolist()
    assert [s.reads for s in sources] == [1, 1, 1]
    assert whole[:0]["x"].shape == (0,) and whole[:0]["x"].dtype == torch.int64


def test_a_store_may_read_rows_itself():
    class Partial(Counted):
        def read_rows(self, rows):
            asked.append(rows.tolist())
            return self.tensor[rows]

    asked: list[list[int]] = []
    source = Partial("p", torch.arange(6))
    parts = DataProto({"p": source}).chunk(3)
    assert parts[1]["p"].tolist() == [2, 3] and asked == [[2, 3]] and source.reads == 0


def test_a_handle_must_hold_what_it_announces():
    class Wrong(Counted):
        def read(self):
            return self.tensor.half()

    with pytest.raises(ValueError, match=r"announced as torch.float32 \(2,\) and read as torch.float16"):
        Wrong("w", torch.zeros(2)).fetch()


class Elsewhere(ColumnHandle):
    """Zeros that are made when they are read."""

    def read(self):
        return torch.zeros(self.shape, dtype=self.dtype)


def test_a_handle_travels_without_what_it_has_read():
    handle = Elsewhere("far", (1000, 1000), torch.float32)
    proto = DataProto.from_single_dict({"x": handle, "z": ["a"] * 1000})
    assert proto["x"].sum() == 0 and len(pickle.dumps(proto)) < 20_000
    copy = pickle.loads(pickle.dumps(proto))
    copy.batch["w"] = torch.zeros(1000)
    assert copy.select(["x"], ["z"]).equal(proto) and torch.equal(copy["x"], proto["x"])
    with pytest.raises(ValueError, match="'odd' has 4 rows"):
        copy.batch["odd"] = torch.zeros(4)


def test_a_local_handle_takes_its_tensor_along():
    tensor = torch.randn(4, 2)
    handle = LocalHandle(tensor)
    copy = pickle.loads(pickle.dumps(handle))
    assert handle.fetch() is tensor and copy.identity == handle.identity and torch.equal(copy.fetch(), tensor)
    assert DataProto({"x": copy}).union(DataProto({"x": handle})).keys() == ["x"]
    with pytest.raises(ValueError, match="they refer to"):
        DataProto({"x": LocalHandle(tensor)}).union(DataProto({"x": handle}))


def test_padding_masks_a_column_by_reference(x):
    mask = Counted("mask", torch.ones(3, 2))
    padded, added = DataProto({"response_mask": mask, **DataProto({"x": x})[:3].stored}).pad_to_multiple(2)
    assert padded["response_mask"].tolist() == [[1, 1]] * 3 + [[0, 0]] and x.reads == 0
    assert mask.fetch().sum() == 6 and torch.equal(padded.unpad(added)["x"], x.tensor[:3])
