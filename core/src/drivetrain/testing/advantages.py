"""What every advantage estimator has to satisfy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from drivetrain.seam.registry import get_registry
from drivetrain.testing.batches import groups, random_columns, spoiled, widened


class AdvantageConformance:
    """Subclass it, set ``name`` to a name offered by ``advantage_estimators`` and ``options`` to its arguments."""

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

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
        """Permuted rows give permuted advantages."""
        columns, order = random_columns(), torch.tensor([5, 0, 7, 2, 1, 6, 3, 4])
        permuted = self._evaluate({name: column[order] for name, column in columns.items()}, groups()[order])
        torch.testing.assert_close(permuted, self._evaluate(columns)[order], rtol=0, atol=1e-12)

    def test_padding_does_not_matter(self) -> None:
        """Further columns beyond the mask change nothing."""
        columns = random_columns()
        torch.testing.assert_close(
            self._evaluate(widened(columns))[:, :-3], self._evaluate(columns), rtol=0, atol=1e-12
        )

    def test_parts_that_the_scope_allows_change_nothing(self) -> None:
        """Estimating the parts apart equals estimating the whole."""
        scope = get_registry().find("advantage_estimators", self.name).spec.scope
        size = {"token": 1, "sequence": 1, "group": 4, "batch": 8}[scope]
        columns = random_columns()
        parts = [slice(start, start + size) for start in range(0, 8, size)]
        pieces = [self._evaluate({k: v[p] for k, v in columns.items()}, groups()[p]) for p in parts]
        torch.testing.assert_close(torch.cat(pieces), self._evaluate(columns), rtol=0, atol=1e-12)

    def _evaluate(self, columns: Mapping[str, Tensor], group: Tensor | None = None) -> Tensor:
        estimator = get_registry().load("advantage_estimators", self.name)
        result = estimator(columns, groups() if group is None else group, **self.options)
        advantages: Tensor = result[0] if isinstance(result, tuple) else result
        return advantages
