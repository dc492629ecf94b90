"""Weights on loan: bounded buckets, an end, and checks at the receiver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from drivetrain import weights
from drivetrain.errors import ExpiredWeightsError, WeightStreamError
from drivetrain.weights import ROW, Manifest, Placement, WeightEntry, fingerprint, fingerprints, lend

SIZES = {"a": 4, "b": 4, "big": 40, "c": 8, "tied": 6, "d": 2}  # numbers of 4 bytes


def tensors(drawn: list[str] | None = None) -> Iterator[tuple[str, Tensor, str | None]]:
    for name, size in SIZES.items():
        if drawn is not None:
            drawn.append(name)
        yield name, torch.full((size,), float(size)), "a" if name == "tied" else None


def test_buckets_are_bounded_and_a_larger_tensor_travels_alone() -> None:
    with lend(tensors(), bucket_bytes=40, version=3) as stream:
        buckets = list(stream)
        assert [[entry.name for entry in bucket.entries] for bucket in buckets] == [
            ["a", "b"], ["big"], ["c", "tied", "d"]
        ]  # fmt: skip
        assert [sum(entry.nbytes for entry in bucket.entries) for bucket in buckets] == [32, 160, 40]
        assert {bucket.version for bucket in buckets} == {3}


def test_tensors_are_drawn_bucket_by_bucket() -> None:
    drawn: list[str] = []
    with lend(tensors(drawn), bucket_bytes=40) as stream:
        assert drawn == []
        next(iter(stream))
        assert drawn == ["a", "b", "big"]


def test_an_alias_has_a_name_and_a_shape_but_no_tensor() -> None:
    with lend(tensors(), bucket_bytes=40) as stream:
        alias = next(entry for bucket in stream for entry in bucket.entries if entry.alias)
        assert (alias.name, alias.alias, alias.shape, alias.nbytes) == ("tied", "a", (6,), 0)
        with pytest.raises(WeightStreamError, match="'tied' is an alias of 'a'"):
            _ = alias.tensor


@pytest.mark.parametrize("index", [0, 1, 2])
def test_shares_of_any_rank_fill_the_same_buckets(index: int) -> None:
    def shares() -> Iterator[WeightEntry]:
        for name, size in SIZES.items():
            part = torch.arange(float(size)).chunk(3)
            mine = part[index] if index < len(part) else torch.empty(0)
            yield WeightEntry.share(name, mine, (size,), Placement(dim=0, index=index, count=3))

    with lend(shares(), bucket_bytes=20) as stream:
        names = [[entry.name for entry in bucket.entries] for bucket in stream]
    assert names == [["a", "b"], ["big"], ["c", "tied"], ["d"]]


def test_an_entry_cannot_be_touched_after_the_loan() -> None:
    with lend(tensors(), bucket_bytes=40) as stream:
        entry = next(iter(stream)).entries[0]
        assert entry.tensor.tolist() == [4.0] * 4
    with pytest.raises(ExpiredWeightsError, match="'a'"):
        _ = entry.tensor


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_stream_cannot_be_iterated_after_the_loan(taken: int) -> None:
    drawn: list[str] = []
    with lend(tensors(drawn), bucket_bytes=40) as stream:
        going = iter(stream)
        for _ in range(taken):
            next(going)
    before = list(drawn)
    for late in (going, iter(stream)):
        with pytest.raises(ExpiredWeightsError):
            next(late)
    assert drawn == before  # a tensor that is gathered from all ranks would wait for them


def test_the_loan_ends_with_an_error_too() -> None:
    with pytest.raises(RuntimeError), lend(tensors(), bucket_bytes=40) as stream:
        entry = next(iter(stream)).entries[0]
        raise RuntimeError
    with pytest.raises(ExpiredWeightsError):
        _ = entry.tensor


def entry(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> WeightEntry:
    return WeightEntry(name=name, shape=shape, dtype=dtype)


@pytest.mark.parametrize(
    "sent, said",
    [
        ([entry("a", 2), entry("c", 2)], "'c' was sent, but"),
        ([entry("a", 2), entry("a", 2)], "'a' was sent twice"),
        ([entry("a", 3)], r"\(3,\); expected \(2,\)"),
        ([entry("a", 2, dtype=torch.int64)], "sent as torch.int64; expected torch.float32"),
        ([entry("a", 2)], "1 weights were not sent, first 'b'"),
        ([], "2 weights were not sent, first 'a'"),
    ],
)
def test_a_receiver_wants_each_weight_once(sent: list[WeightEntry], said: str) -> None:
    manifest = Manifest({"a": ((2,), torch.float32), "b": ((), torch.float32)})
    with pytest.raises(WeightStreamError, match=said):
        for one in sent:
            manifest.accept(one)
        manifest.complete()


def test_a_whole_model_is_accepted_in_any_order() -> None:
    manifest = Manifest({"a": ((2,), torch.float32), "b": ((), torch.float32)})
    for one in (entry("b"), entry("a", 2, dtype=torch.bfloat16)):  # a receiver may round
        manifest.accept(one)
    manifest.complete()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_equal_content_has_an_equal_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).remainder(2).to(dtype)
    transposed = tensor.t().contiguous().t()  # the same numbers in another order of memory
    assert not transposed.is_contiguous()
    assert fingerprint(tensor) == fingerprint(tensor.clone()) == fingerprint(transposed)
    tensor.untyped_storage().resize_(0)  # its memory can still be freed


def test_any_difference_changes_the_fingerprint() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    changed = tensor.clone()
    changed[2, 3] = torch.nextafter(changed[2, 3], torch.tensor(99.0))
    others = [
        tensor,
        changed,
        tensor.reshape(4, 3),
        tensor.view(torch.int32),
        tensor.flip(0),
        torch.zeros(0),
        torch.zeros(3),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.tensor(1.0),
    ]
    assert len(set(fingerprints(others))) == len(others)
    assert fingerprints(others) == [fingerprint(other) for other in others] and fingerprints([]) == []


LARGE = torch.arange(3 * ROW + 5, dtype=torch.int32)  # words of three rows, and a few


@pytest.mark.parametrize(
    "places",
    [(7, 8), (7, ROW + 7), (ROW + 2, 2 * ROW + 1), (5, 3 * ROW + 4), (3 * ROW, 3 * ROW + 1)],
    ids=["in a row", "between rows", "across", "with the last", "in the rest"],
)
def test_a_swap_of_two_words_shows(places: tuple[int, int]) -> None:
    swapped = LARGE.clone()
    swapped[list(places)] = LARGE[list(places[::-1])]
    negative = LARGE.clone()  # words that differ in their sign alone
    negative[places[0]] = LARGE[places[0]] - 2**31
    other = negative.clone()
    other[list(places)] = negative[list(places[::-1])]
    twice = negative.clone()
    twice[places[1]] = LARGE[places[1]] - 2**31
    found = fingerprints([LARGE, LARGE.roll(1), LARGE.roll(ROW), swapped, negative, other, twice])
    assert len(set(found)) == len(found)


def test_every_bit_counts() -> None:
    octets = torch.arange(11, dtype=torch.uint8)
    flipped = [octets.clone() for _ in range(88)]
    for number, one in enumerate(flipped):
        one[number // 8] ^= 1 << number % 8
    found = fingerprints([octets, *flipped])
    assert len(set(found)) == 89


def test_where_bytes_lie_does_not_count() -> None:
    """Neither that they start where no word does, nor what they are part of."""
    around = torch.arange(4 * ROW * 5, dtype=torch.int64).to(torch.uint8)
    for start in range(4):
        inside = around[start : start + 4 * ROW * 4 + 7]  # more than what is summed at once
        assert fingerprint(inside) == fingerprint(inside.clone())


@pytest.mark.parametrize("row", [4, ROW])
def test_the_checksum_is_the_sum_that_is_documented(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of more rows than there are numbers at hand."""

    def mixed(number: int) -> int:
        """Splitmix64, in integers of any size."""
        z = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) | 1

    monkeypatch.setattr(weights, "ROW", row)
    words = LARGE[-123:]
    total = sum(mixed(row + i // row) * mixed(i % row) * word for i, word in enumerate(words.tolist())) % 2**64
    assert int(weights._checksum(words, weights._odd(0, 2 * row, words.device))) % 2**64 == total
