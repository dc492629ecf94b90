"""What a backend says of an optimizer step that it took, skipped or refused."""

from __future__ import annotations

from drivetrain import NonFiniteError
from drivetrain.metrics import Mean, Metric, Sum


def not_finite(role: str, loss: float, norm: float, *, allowed: int) -> NonFiniteError:
    """The error of a loss, or a norm of its gradient, that is not finite after ``allowed`` skipped updates."""
    before = f", after {allowed} skipped updates" if allowed else ""
    return NonFiniteError(f"the loss is {loss} and the norm of its gradient {norm}{before}; no weight was changed",
                          where=f"update of {role}",
                          mend="look for extreme rewards or log-probabilities, or lower the learning rate",
                          )  # fmt: skip


def step_metrics(lr: float, loss: float, norm: float, *, finite: bool, allowed: int, counts: bool) -> dict[str, Metric]:
    """``lr``, ``loss``, ``grad_norm``, and where updates may be skipped ``skipped_steps``.

    Args:
        finite: whether the step was taken; otherwise there is no loss and no norm.
        allowed: updates in a row that may be skipped.
        counts: whether this rank tells of a skipped step, which counts once over all ranks.
    """
    metrics: dict[str, Metric] = {"lr": Mean(lr, 1)}
    for name, value in (("loss", loss), ("grad_norm", norm)):
        metrics[name] = Mean(value, 1) if finite else Mean(0.0, 0)  # of the updates that were taken
    if allowed:
        metrics["skipped_steps"] = Sum(float(not finite and counts))
    return metrics
