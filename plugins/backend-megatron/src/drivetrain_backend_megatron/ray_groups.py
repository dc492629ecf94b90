"""Worker groups on Ray whose ranks stand in megatron-core's mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain import UserError
from drivetrain_backend_megatron.workers import MegatronGlobalInfo, MegatronRankInfo, MegatronWorker
from drivetrain_executor_ray import ColocatedWorkers, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


class MegatronRayWorkerGroup(RayWorkerGroup):
    """A worker group whose calls are dispatched by megatron-core's mesh, and that tells its sizes and places.

    Args:
        resource_pool, ray_cls_with_init, name_prefix: as of :class:`drivetrain_executor_ray.RayWorkerGroup`.
        default_megatron_kwargs: settings of the backend ``megatron`` with which process groups are made at once, by
            the workers that derive from :class:`MegatronWorker`. Omitted: models make them, by their settings.
        options: other arguments of the base class.

    Raises:
        drivetrain.UserError: there are such settings, and no worker that derives from MegatronWorker.
    """

    def __init__(
        self, resource_pool: RayResourcePool, ray_cls_with_init: RayClassWithInitArgs | ColocatedWorkers,
        name_prefix: str = "", *, default_megatron_kwargs: Mapping[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        settings, made = default_megatron_kwargs, ray_cls_with_init
        workers = made.classes if isinstance(made, ColocatedWorkers) else {"": made}
        theirs = [prefix for prefix, worker in workers.items() if issubclass(worker.cls, MegatronWorker)]
        if settings is not None and not theirs:
            raise UserError("no worker derives from MegatronWorker, so none takes these settings",
                            where="default_megatron_kwargs", mend="derive one, or leave them out")  # fmt: skip
        super().__init__(resource_pool, made, name_prefix, **options)
        if settings is not None:
            groups = self.spawn(theirs) if isinstance(made, ColocatedWorkers) else {"": self}
            for group in groups.values():
                group.call("init_megatron", **settings)

    def get_megatron_global_info(self) -> MegatronGlobalInfo:
        """The sizes by which calls are dispatched; data parallelism alone until there are process groups."""
        return MegatronGlobalInfo.of(self.layouts("train")[0])

    def get_megatron_rank_info(self, rank: int) -> MegatronRankInfo:
        """A rank's place, by which calls are dispatched."""
        return MegatronRankInfo.of(self.layouts("train")[rank])
