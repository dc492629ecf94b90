"""What every advantage estimator has to satisfy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from drivetrain.seam.registry import get_registry
from drivetrain.testing.batches import groups, padded, random_columns, spoiled


class AdvantageConformance:
    """Subclass it, set ``name`` to a name offered by ``advantage_estimators`` and ``options`` to its arguments.

    ``equal_rewards_give_zero`` says whether advantages are 0 where the responses to a prompt have equal rewards.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    equal_rewards_give_zero: ClassVar[bool] = True

    def test_masked_positions_do_not_matter(self) -> None:
        """NaN beyond the mask changes nothing."""
        columns = random_columns()
        mask = columns["response_mask"]
        again = self._evaluate({name: spoiled(column, mask) for name, column in columns.items()})
        torch.testing.assert_close(again, self._evaluate(columns), rtol=0, atol=1e-12)

    def test_zero_beyond_the_mask(self) -> None:
        """Advantages are exactly zero where the mask is."""
        columns = random_columns()
        assert self._evaluate(columns)[columns["response_mask"] == 0].abs().sum() == 0

    def test_order_of_rows_does_not_matter(self) -> None:
        """Permuted rows, those of a group no longer side by side, give permuted advantages."""
        columns, order = random_columns(), torch.tensor([5, 0, 7, 2, 1, 6, 3, 4])
        permuted = self._evaluate({name: column[order] for name, column in columns.items()}, groups()[order])
        torch.testing.assert_close(permuted, self._evaluate(columns)[order], rtol=0, atol=1e-12)

    def test_padding_does_not_matter(self) -> None:
        """Further columns beyond the mask change nothing."""
        columns = random_columns()
        wider = {name: padded(column) for name, column in columns.items()}
        torch.testing.assert_close(self._evaluate(wider)[:, :-3], self._evaluate(columns), rtol=0, atol=1e-12)

    def test_parts_that_the_scope_allows_change_nothing(self) -> None:
        """Estimating the parts apart equals estimating the whole."""
        scope = get_registry().find("advantage_estimators", self.name).spec.scope
        size = {"token": 1, "sequence": 1, "group": 4, "batch": 8}[scope]
        columns = random_columns()
        parts = [slice(start, start + size) for start in range(0, 8, size)]
        pieces = [self._evaluate({k: v[p] for k, v in columns.items()}, groups()[p]) for p in parts]
        torch.testing.assert_close(torch.cat(pieces), self._evaluate(columns), rtol=0, atol=1e-12)

    def test_columns_are_those_of_the_spec(self) -> None:
        """Besides rewards and mask, nothing is read but what the spec's ``needs`` names."""
        columns = random_columns()
        needs = get_registry().find("advantage_estimators", self.name).spec.needs
        few = {name: columns[name] for name in ("token_level_rewards", "response_mask", *needs)}
        torch.testing.assert_close(self._evaluate(few), self._evaluate(columns), rtol=0, atol=0)

    def test_equal_rewards(self) -> None:
        """Equal rewards within each group give advantages of zero, if and only if the class says so."""
        columns = random_columns()
        mask = columns["response_mask"]
        last = mask.cumsum(1).argmax(1, keepdim=True)
        rewards = torch.zeros_like(columns["values"]).scatter(1, last, 0.3 + groups().double()[:, None])
        result = self._evaluate({**columns, "token_level_rewards": rewards})
        assert bool((result.abs() < 1e-12).all()) == self.equal_rewards_give_zero

    def test_a_group_of_one(self) -> None:
        """One response to a prompt, among prompts with several, gives finite advantages."""
        columns = random_columns()
        self._check(self._evaluate(columns, torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])), columns["response_mask"])

    def test_empty_responses(self) -> None:
        """Responses without a selected token, some of the rows or all of them, have advantages of zero."""
        for rows in ([1, 4], list(range(8))):
            columns = random_columns()
            mask = columns["response_mask"]
            mask[rows] = 0
            self._check(self._evaluate({name: spoiled(column, mask) for name, column in columns.items()}), mask)

    def test_dtype_is_kept(self) -> None:
        """Rewards in float32 give advantages in float32."""
        columns = {name: c.float() if c.is_floating_point() else c for name, c in random_columns().items()}
        assert self._evaluate(columns).dtype == torch.float32

    @staticmethod
    def _check(result: Tensor, mask: Tensor) -> None:
        assert result.isfinite().all() and result[mask == 0].abs().sum() == 0

    def _evaluate(self, columns: Mapping[str, Tensor], group: Tensor | None = None) -> Tensor:
        estimator = get_registry().load("advantage_estimators", self.name)
        result = estimator(columns, groups() if group is None else group, **self.options)
        advantages: Tensor = result[0] if isinstance(result, tuple) else result
        return advantages
