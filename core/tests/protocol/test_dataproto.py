"""DataProto: what each method returns, what it refuses, and that it leaves its arguments alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from drivetrain.protocol import DataProto


def batch_of(rows: int = 4) -> DataProto:
    tensors = {"input_ids": torch.arange(rows * 3).view(rows, 3), "response_mask": torch.ones(rows, 3).bool()}
    return DataProto.from_single_dict({**tensors, "uid": [f"u{row // 2}" for row in range(rows)]}, {"step": 7})


def test_a_step_of_training_has_this_shape():
    batch = DataProto.from_single_dict(
        {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 3).long(), "answer": ["4", "5"]}
    )
    prompts = batch.pop(["input_ids", "attention_mask"])
    assert prompts.keys() == ["input_ids", "attention_mask"] and batch.keys() == ["answer"]
    batch = batch.union(DataProto({"responses": torch.zeros(2, 5).long()}))
    batch.batch["token_level_scores"] = torch.ones(2, 5)
    assert batch["token_level_scores"].shape == (2, 5) and len(batch) == 2


def test_from_single_dict_sorts_columns_by_kind():
    batch = DataProto.from_single_dict(
        {"a": torch.zeros(2), "n": np.zeros((2, 3)), "nested": [[1, 2], [3, 4]], "s": np.array(["x", "y"])}
    )
    assert list(batch.batch) == ["a"]
    assert batch["n"].dtype == float and batch["nested"].shape == (2,) and batch["nested"][1] == [3, 4]
    assert batch["s"].dtype == object


@pytest.mark.parametrize("column", [torch.zeros(3), np.zeros(3), ["a", "b", "c"]])
def test_a_column_of_another_length_is_named(column):
    with pytest.raises(ValueError, match="column 'odd' has 3 rows; the batch has 2, as 'a'"):
        DataProto.from_single_dict({"a": torch.zeros(2), "odd": column})
    batch = DataProto.from_dict({"a": torch.zeros(2)}, {"b": ["x", "y"]})
    with pytest.raises(ValueError, match="'odd' has 3 rows"):
        (batch.batch if isinstance(column, torch.Tensor) else batch.non_tensor_batch)["odd"] = column


@pytest.mark.parametrize("column", [3, "text", {"a": 1}, None])
def test_a_column_of_another_type_is_named(column):
    with pytest.raises(TypeError, match="'odd'"):
        DataProto.from_single_dict({"odd": column})


def test_scalars_and_names_on_both_sides_are_refused():
    with pytest.raises(ValueError, match="'odd' is a scalar"):
        DataProto({"odd": torch.tensor(1.0)})
    batch = batch_of()
    with pytest.raises(ValueError, match="'uid' cannot be both"):
        batch.batch["uid"] = torch.zeros(4)
    with pytest.raises(ValueError, match="'input_ids' cannot be both"):
        batch.non_tensor_batch["input_ids"] = ["a"] * 4
    with pytest.raises(TypeError, match="'odd' cannot be a list"):
        batch.batch["odd"] = [1, 2, 3, 4]


def test_batch_is_a_mapping_over_a_tensordict():
    batch = DataProto(TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2]))
    batch.batch["b"] = torch.ones(2)
    del batch.batch["a"]
    assert dict(batch.batch).keys() == {"b"}
    assert isinstance(batch.batch.tensordict(), TensorDict) and batch.batch.tensordict().batch_size == (2,)
    with pytest.raises(KeyError, match="no column 'a'; there are"):
        batch.batch["a"]


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (1, [1]),
        (-1, [3]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        (torch.tensor([True, False, True, False]), [0, 2]),
        ([False, False, False, True], [3]),
        (torch.tensor([3, 0, 0]), [3, 0, 0]),
        (np.array([-1, 1]), [3, 1]),
        ([], []),
        (range(2, 4), [2, 3]),
    ],
)
def test_rows_by_any_index(index, rows):
    chosen = batch_of()[index]
    assert chosen["input_ids"].tolist() == [[3 * row, 3 * row + 1, 3 * row + 2] for row in rows]
    assert chosen["uid"].tolist() == [f"u{row // 2}" for row in rows]
    assert len(chosen) == len(rows) and chosen.meta_info == {"step": 7}


@pytest.mark.parametrize("index", [4, -5, [0, 4], torch.tensor([True]), torch.tensor([0.5]), torch.zeros(2, 2).long()])
def test_no_index_of_these_rows(index):
    with pytest.raises(IndexError):
        batch_of()[index]


def test_unknown_names_say_what_there_is():
    batch = batch_of()
    for action in (
        lambda: batch["nope"],
        lambda: batch.pop(["uid", "nope"]),
        lambda: batch.select(["nope"]),
        lambda: batch.rename({"nope": "x"}),
    ):
        with pytest.raises(KeyError, match=r"'nope'.*'input_ids', 'response_mask'"):
            action()
    with pytest.raises(KeyError, match=r"no meta_info.*'step'"):
        batch.pop(meta_info_keys=["nope"])
    assert batch.equal(batch_of())


def test_select_pop_rename_with_columns():
    batch = batch_of()
    assert batch.select(["input_ids"]).keys() == ["input_ids", "uid"]
    assert batch.select(["input_ids"], [], []).keys() == ["input_ids"]
    assert batch.select([], [], []).meta_info == {} and len(batch.select([], [])) == 0
    renamed = batch.rename({"uid": "prompt_id", "input_ids": "tokens"})
    assert renamed.keys() == ["tokens", "response_mask", "prompt_id"]
    assert batch.rename({"uid": "input_ids", "input_ids": "x"})["input_ids"].tolist() == ["u0", "u0", "u1", "u1"]
    with pytest.raises(ValueError, match="one name"):
        batch.rename({"uid": "input_ids"})
    new = batch.with_columns(uid=torch.arange(4), score=[1, 2, 3, 4])
    assert new["uid"].tolist() == [0, 1, 2, 3] and new["score"].dtype == object
    popped = batch.pop(["uid", "uid", "input_ids"], ["step"])
    assert popped.keys() == ["input_ids", "uid"] and popped.meta_info == {"step": 7}
    assert batch.keys() == ["response_mask"] and batch.meta_info == {}


def test_union_takes_equal_columns_and_mutates_neither():
    nan = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    left = DataProto({"x": nan}, {"a": [{"k": [1.0, float("nan")]}, np.arange(3)]}, {"one": 1})
    right = DataProto({"x": nan.clone(), "y": torch.zeros(2)}, {"a": [{"k": [1.0, float("nan")]}, np.arange(3)]})
    right.meta_info = {"two": torch.ones(2)}
    both = left.union(right)
    assert both.keys() == ["x", "y", "a"] and set(both.meta_info) == {"one", "two"}
    assert left.keys() == ["x", "a"] and left.meta_info == {"one": 1} and right.keys() == ["x", "y", "a"]
    assert both["x"] is left["x"]


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1, 5, 6]), "'x'.*first at row 1"),
        (torch.tensor([[0.0, float("nan")]]), torch.tensor([[float("nan"), float("nan")]]), "'x'.*first at row 0"),
        (torch.zeros(2), torch.zeros(2).half(), "'x'.*torch.float32 .2,. is not torch.float16"),
        (torch.zeros(2, 1), torch.zeros(2, 2), r"'x'.*\(2, 1\) is not .*\(2, 2\)"),
        (["a", {"k": 1}], ["a", {"k": 2}], "'x'.*first at row 1"),
        (["a", np.arange(2)], ["a", np.arange(3)], "'x'.*first at row 1"),
        (np.array([[1, 2], [3, 4]], np.uint16), np.array([[1, 2], [3, 5]], np.uint16), "'x'.*first at row 1"),
        (torch.zeros(2).long(), np.zeros(2, np.int64), "'x' differs"),
    ],
)
def test_union_names_what_differs(left, right, message):
    with pytest.raises(ValueError, match=message):
        DataProto.from_single_dict({"x": left}).union(DataProto.from_single_dict({"x": right}))


def test_union_of_meta_info_and_of_other_rows():
    with pytest.raises(ValueError, match="meta_info 'lr' differs: 1 and 2"):
        DataProto(meta_info={"lr": 1}).union(DataProto(meta_info={"lr": 2}))
    with pytest.raises(ValueError, match="'y' has 3 rows; the batch has 2"):
        DataProto({"x": torch.zeros(2)}).union(DataProto({"y": torch.zeros(3)}))
    assert len(DataProto(meta_info={"a": 1}).union(batch_of())) == 4


def test_chunk_and_split():
    assert [len(part) for part in batch_of(6).chunk(3)] == [2, 2, 2]
    assert [len(part) for part in batch_of(5).split(2)] == [2, 2, 1]
    with pytest.raises(ValueError, match="5 rows cannot be cut into 2 equal chunks"):
        batch_of(5).chunk(2)
    with pytest.raises(ValueError, match="zero"):
        batch_of(5).split(0)


def test_slices_and_columns_share_memory():
    batch = batch_of(6)
    memory = batch["input_ids"].untyped_storage().data_ptr()
    others = [batch.select(), batch.chunk(2)[1], batch.union(DataProto()), batch.reorder(range(6)), batch[::2]]
    assert all(other["input_ids"].untyped_storage().data_ptr() == memory for other in others)


def test_concat_says_what_does_not_fit():
    a = DataProto({"x": torch.zeros(2, 3)}, meta_info={"k": 1})
    for other, message in [
        (DataProto({"y": torch.zeros(2)}), "'x' is .* in part 0, missing in part 1"),
        (DataProto({"x": torch.zeros(2, 4)}), r"'x' is .*\(3,\) in part 0, .*\(4,\) in part 1"),
        (DataProto({"x": torch.zeros(2, 3).bfloat16()}), "'x' is torch.float32 .*bfloat16"),
        (DataProto({"x": torch.zeros(2, 3)}, meta_info={"k": 2}), "meta_info 'k' differs"),
    ]:
        with pytest.raises(ValueError, match=message):
            DataProto.concat([a, other])
    with pytest.raises(ValueError, match="no batches"):
        DataProto.concat([])


def test_repeat_and_reorder():
    batch = batch_of(2)
    assert batch.repeat(2)["input_ids"][:, 0].tolist() == [0, 0, 3, 3]
    assert batch.repeat(2, interleave=False)["input_ids"][:, 0].tolist() == [0, 3, 0, 3]
    assert batch.reorder(torch.tensor([1, 0]))["input_ids"][:, 0].tolist() == [3, 0]
    with pytest.raises(ValueError, match="each of 2 rows once"):
        batch.reorder([0, 0])


def test_padding_never_counts_and_never_touches_the_caller():
    batch = batch_of(3)
    padded, added = batch.pad_to_multiple(4)
    assert added == 1 and len(padded) == 4 and padded["input_ids"][3].tolist() == padded["input_ids"][0].tolist()
    assert padded["response_mask"].sum(1).tolist() == [3, 3, 3, 0]
    assert padded["is_padding"].tolist() == [False, False, False, True]
    assert padded.chunk(2)[1]["is_padding"].tolist() == [False, True]
    padded.batch["input_ids"].zero_()
    assert batch.equal(batch_of(3))
    unmarked, none = batch.pad_to_multiple(3)
    assert none == 0 and unmarked.equal(batch)
    assert len(batch_of(2)[:1].pad_to_multiple(8)[0]) == 8


def test_padding_refuses_what_would_go_wrong():
    padded, added = batch_of(3).pad_to_multiple(4)
    with pytest.raises(ValueError, match="padded already"):
        padded.pad_to_multiple(3)
    with pytest.raises(ValueError, match="unpad before"):
        padded.mini_batches(1)
    with pytest.raises(ValueError, match="the last 1 of 4 rows are not the padded ones"):
        padded.reorder([3, 0, 1, 2]).unpad(added)
    with pytest.raises(ValueError, match="the last 5 of 4 rows are not"):
        padded.unpad(5)
    with pytest.raises(ValueError, match="multiple of 0"):
        padded.pad_to_multiple(0)
    returned = DataProto({"values": torch.arange(4)})
    assert returned.unpad(added)["values"].tolist() == [0, 1, 2]


def test_to_and_repr():
    assert batch_of().to("meta")["input_ids"].device.type == "meta"
    assert "input_ids torch.int64 (4, 3)" in repr(batch_of())
