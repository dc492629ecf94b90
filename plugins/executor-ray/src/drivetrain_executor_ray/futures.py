"""Results of calls that are not waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain import DataProto

if TYPE_CHECKING:
    from drivetrain_executor_ray.groups import Pending


class FutureResult:
    """The result of a call that was not waited for; another call takes it as an argument without waiting, too."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending

    def get(self) -> Any:
        """Wait for the result.

        Raises:
            drivetrain.WorkerError: a worker died, raised or was not in time.
        """
        return self.pending.result()


class FutureBatch(DataProto):
    """A batch that is still being computed: looking at it waits, passing it to another call does not.

    Its columns stay with the ranks that made them until one is looked at.
    """

    def __init__(self, pending: Pending) -> None:
        self.pending = pending

    def get(self) -> DataProto:
        """Wait for the batch."""
        batch: DataProto = self.pending.result()
        return batch

    @property
    def batch(self) -> Any:  # type: ignore[override]
        return self.get().batch

    @property
    def non_tensor_batch(self) -> Any:  # type: ignore[override]
        return self.get().non_tensor_batch

    @property
    def meta_info(self) -> dict[str, Any]:  # type: ignore[override]
        return self.get().meta_info

    def __reduce__(self) -> tuple[Any, ...]:
        return DataProto.from_single_dict, (self.stored, self.meta_info)


def waited(value: Any) -> Any:
    """The result of a future; anything else as it is."""
    return value.get() if isinstance(value, (FutureBatch, FutureResult)) else value


def is_pending(value: Any) -> bool:
    """Whether a value is a result that has not been waited for."""
    return isinstance(value, (FutureBatch, FutureResult)) and not value.pending.done
