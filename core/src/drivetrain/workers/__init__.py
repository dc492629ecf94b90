"""Generic workers: independent of the engines, which they reach through their contracts."""

from drivetrain.workers.actor_rollout_ref import ActorRolloutRefWorker
from drivetrain.workers.critic import CriticWorker
from drivetrain.workers.model_worker import ModelWorker
from drivetrain.workers.registration import Registration, register, registration
from drivetrain.workers.reward_model import RewardModelWorker
from drivetrain.workers.worker import Worker

__all__ = [
    "ActorRolloutRefWorker", "CriticWorker", "ModelWorker", "Registration", "RewardModelWorker", "Worker", "register",
    "registration",
]  # fmt: skip
