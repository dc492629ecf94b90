"""Generic workers: independent of the engines, which they reach through their contracts."""

from drivetrain.workers.actor_rollout_ref import ActorRolloutRefWorker
from drivetrain.workers.critic import CriticWorker
from drivetrain.workers.generative_reward import GenerativeRewardWorker
from drivetrain.workers.model_worker import ModelWorker
from drivetrain.workers.registration import DispatchedCall, Execute, Registration, dispatch_call, register, registration
from drivetrain.workers.reward_model import RewardModelWorker
from drivetrain.workers.worker import Worker

__all__ = [
    "ActorRolloutRefWorker", "CriticWorker", "DispatchedCall", "Execute", "GenerativeRewardWorker", "ModelWorker",
    "Registration", "RewardModelWorker", "Worker", "dispatch_call", "register", "registration",
]  # fmt: skip
