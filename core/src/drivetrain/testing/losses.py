"""What every term of an objective has to satisfy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from drivetrain.numerics import Counts, LossInputs
from drivetrain.seam.registry import get_registry
from drivetrain.testing.batches import groups, padded, random_columns, spoiled

_OUTPUTS = ("log_probs", "entropy", "values")


class LossConformance:
    """Subclass it, set ``name`` to a name offered by ``policy_losses`` and ``options`` to its arguments."""

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    def test_masked_positions_do_not_matter(self) -> None:
        """NaN beyond the mask changes neither the loss nor a gradient."""
        columns = random_columns()
        loss, gradient = self._evaluate(columns)
        mask = columns["response_mask"]
        again, gradient_again = self._evaluate({name: spoiled(column, mask) for name, column in columns.items()})
        torch.testing.assert_close(again, loss, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient_again, gradient, rtol=0, atol=1e-12)
        assert (gradient_again[mask == 0] == 0).all()

    def test_rows_may_come_in_any_order(self) -> None:
        """Permuting the rows permutes the gradient and leaves the loss."""
        columns = random_columns()
        loss, gradient = self._evaluate(columns)
        counts, order = Counts.of(columns["response_mask"], groups()), torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
        again, gradient_again = self._evaluate({name: column[order] for name, column in columns.items()}, counts)
        torch.testing.assert_close(again, loss, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient_again, gradient[order], rtol=0, atol=1e-12)

    def test_rows_without_a_token_add_nothing(self) -> None:
        """Responses of length zero, whatever stands in their rows, change neither the loss nor a gradient."""
        columns = random_columns()
        loss, gradient = self._evaluate(columns)
        counts, nothing = Counts.of(columns["response_mask"], groups()), torch.zeros_like(columns["response_mask"][-2:])
        longer = {name: torch.cat([column, self._empty(column, nothing)]) for name, column in columns.items()}
        longer["response_mask"][-2:] = 0
        again, gradient_again = self._evaluate(longer, counts)
        torch.testing.assert_close(again, loss, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient_again[:-2], gradient, rtol=0, atol=1e-12)
        assert (gradient_again[-2:] == 0).all()

    def test_padding_does_not_matter(self) -> None:
        """Further columns beyond the mask change nothing."""
        columns = random_columns()
        loss, gradient = self._evaluate(columns)
        wider = {name: padded(column) for name, column in columns.items()}
        again, gradient_again = self._evaluate(wider)
        torch.testing.assert_close(again, loss, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient_again[:, :-3], gradient, rtol=0, atol=1e-12)

    def test_micro_batches_sum_to_the_whole(self) -> None:
        """Shares over parts that the scope allows add up to the loss of the whole, and so do the gradients."""
        columns = random_columns()
        loss, gradient = self._evaluate(columns)
        counts = Counts.of(columns["response_mask"], groups())
        shares = [self._evaluate({k: v[part] for k, v in columns.items()}, counts) for part in self._parts()]
        torch.testing.assert_close(torch.stack([share for share, _ in shares]).sum(), loss, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat([part for _, part in shares]), gradient, rtol=0, atol=1e-12)

    def test_gradient_reaches_the_outputs_it_names(self) -> None:
        """The loss depends on the outputs in the spec's ``needs``."""
        _, gradient = self._evaluate(random_columns())
        assert gradient.abs().sum() > 0

    def test_nothing_selected_is_finite(self) -> None:
        """A mini-batch whose mask is all zero gives a finite loss and no gradient."""
        columns = random_columns()
        columns["response_mask"] = torch.zeros_like(columns["response_mask"])
        loss, gradient = self._evaluate(columns)
        assert loss.isfinite() and gradient.abs().sum() == 0

    @staticmethod
    def _empty(column: Tensor, nothing: Tensor) -> Tensor:
        """What stands in two rows without a token: NaN; of columns with one number a row those before, labels new."""
        if column.dim() > 1:
            return spoiled(column[-2:], nothing)
        return column[-2:] if column.is_floating_point() else column[-2:] + 1

    def _parts(self) -> list[slice]:
        scope = get_registry().find("policy_losses", self.name).spec.scope
        size = {"token": 3, "sequence": 3, "group": 4, "batch": 8}[scope]
        return [slice(start, start + size) for start in range(0, 8, size)]

    def _evaluate(self, columns: Mapping[str, Tensor], counts: Counts | None = None) -> tuple[Tensor, Tensor]:
        """The loss, and the sum of its gradients with respect to the outputs that it needs."""
        registry = get_registry()
        needs = registry.find("policy_losses", self.name).spec.needs
        outputs = {name: columns[name].clone().requires_grad_() for name in _OUTPUTS}
        if counts is None:
            counts = Counts.of(columns["response_mask"], groups())
        result = registry.load("policy_losses", self.name)(LossInputs(**outputs), columns, counts, **self.options)
        gradients = torch.autograd.grad(result.loss, [outputs[name] for name in needs], allow_unused=True)
        zero = torch.zeros_like(outputs["log_probs"])
        return result.loss.detach(), sum((g for g in gradients if g is not None), start=zero)
