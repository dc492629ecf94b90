"""Generic workers: independent of the engines, which they reach through their contracts."""

from drivetrain.workers.actor_rollout_ref import ActorRolloutRefWorker
from drivetrain.workers.registration import Registration, register, registration
from drivetrain.workers.worker import Worker

__all__ = ["ActorRolloutRefWorker", "Registration", "Worker", "register", "registration"]
