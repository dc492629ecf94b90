"""The transport ``in_process``: what this process lends, it receives."""

from __future__ import annotations

from drivetrain import RunError
from drivetrain.weights import WeightStream


class InProcess:
    """Hands a stream over. It is drawn from by the receiver, while the sender's loan lasts."""

    def __init__(self) -> None:
        self._stream: WeightStream | None = None

    def send(self, stream: WeightStream) -> None:
        """Offer a stream to :meth:`receive`; none of it is drawn here."""
        self._stream = stream

    def receive(self) -> WeightStream:
        """The stream that was sent last, once.

        Raises:
            RunError: nothing was sent.
        """
        stream, self._stream = self._stream, None
        if stream is None:
            raise RunError("nothing was sent", where="weight transport in_process")
        return stream
