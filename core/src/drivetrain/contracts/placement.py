"""The contracts of where workers live and of who holds the devices when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from drivetrain.config import PluginConfig, RunConfig
    from drivetrain.contracts.backend import TrainingBackend
    from drivetrain.contracts.hardware import Hardware
    from drivetrain.contracts.rollout import RolloutEngine
    from drivetrain.weights import WeightStream


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """Workers to start."""

    name: str  # of the group, such as actor_rollout_ref
    worker: str  # "module:Class"
    roles: tuple[str, ...]  # that each worker of the group plays
    reads: tuple[Path, ...] = ()  # files and folders, besides those of the config, such as a checkpoint


class WorkerGroup(ABC):
    """Workers that are called together.

    Attributes:
        where: ranks by node, in words; empty where all are on the driver's.
        answered: called while a call is waited for, with how many ranks have answered, and how many were asked.
    """

    where: str = ""
    answered: Callable[[int, int], None] = staticmethod(lambda done, asked: None)

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of workers."""

    @abstractmethod
    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method on the ranks, with arguments split and results collected by its dispatch mode."""

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Start a call, as :meth:`call`; what is returned waits for its result.

        Here the call is over on return; a group whose workers are in other processes returns at once.
        """
        result = self.call(method, *args, **kwargs)
        return lambda: result

    def take_metrics(self) -> Mapping[str, float]:
        """Metrics of the calls since the last time, such as what they moved; by default there are none."""
        return {}


class Executor(ABC):
    """Starts workers somewhere, and ends them."""

    def __init__(self, config: PluginConfig) -> None:
        self.config = config

    @abstractmethod
    def start(self, plans: Sequence[GroupPlan], run: RunConfig) -> Mapping[str, WorkerGroup]:
        """Start all groups; a placement that cannot be had is refused before any worker starts."""

    @abstractmethod
    def shutdown(self) -> None:
        """End all workers; nothing of them remains."""


class HybridEngine(ABC):
    """Who holds the devices when, and how weights get from training to generation. One lives in each worker.

    Entering a phase returns metrics of the switch. With the capability ``hybrid_engine.two_groups``, training and
    generation are two worker groups, whose workers enter a phase at the same time.
    """

    shares: bool = False  # once attached: they are one module, so the rollout has the very weights that are trained

    def __init__(self, config: PluginConfig) -> None:
        self.config = config

    @abstractmethod
    def attach(self, backend: TrainingBackend | None, rollout: RolloutEngine | None) -> None:
        """Couple the two engines of this worker, the backend initialised, the rollout about to be.

        With two groups, the one that lives in the other group is None.
        """

    def open(self) -> str:
        """Get ready to be met (on the ranks that train, of two groups); rank 0 returns the address for the others."""
        raise TypeError(f"hybrid engine {self.config.name!r} does not offer hybrid_engine.two_groups")

    def connect(self, address: str) -> str:
        """Meet the ranks of the other group, all at the same time, everything initialised; returns how, in words."""
        raise TypeError(f"hybrid engine {self.config.name!r} does not offer hybrid_engine.two_groups")

    @abstractmethod
    def enter_generation(self, version: int) -> Mapping[str, float]:
        """Get ready to generate with the weights of that version.

        Parameters that the backend offloads are on the device, and will leave it after the call; they may do so in it,
        before a rollout takes memory that it needs for generation alone.
        """

    @abstractmethod
    def enter_training(self) -> Mapping[str, float]:
        """Get ready to train."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The processes that the ends of a weight transport are in."""

    store: Store  # of torch.distributed, that all of them reach; keys of a meeting are its own
    rank: int  # of this process; 0 sends, the others receive
    size: int
    hardware: Hardware  # of this process
    timeout_s: float = 1800.0  # longest wait for another process


class WeightTransport(Protocol):
    """Carries buckets from where weights are trained to where they generate.

    The factory takes a :class:`Meeting`; that of a transport with both ends in one process (capability
    ``weight_transport.same_process``) takes nothing. One that connects processes of a node, and none of another, has
    capability ``weight_transport.same_device``.
    """

    def send(self, stream: WeightStream) -> None:
        """On the side of training: send every bucket."""

    def receive(self) -> WeightStream:
        """On the side of generation: the buckets, in the order sent."""


class Environment(Protocol):
    """How an episode unfolds after the prompt."""

    def step(self, episode: Mapping[str, Any], response_token_ids: Sequence[int]) -> tuple[Sequence[int], bool]:
        """Take the policy's turn; return the tokens that the environment adds (masked out of every loss), and
        whether the episode is over."""
