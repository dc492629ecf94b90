"""Sections in each other's company: roles that derive, capabilities that must meet, sizes that must divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drivetrain.config.base import PluginConfig, Problem
from drivetrain.config.layers import dotted
from drivetrain.config.models import TWO_GROUPS, CriticConfig, ReferenceConfig, RewardModelConfig, RunConfig
from drivetrain.config.sections import plugin_sections
from drivetrain.seam.registry import Registry
from drivetrain.seam.specs import SPEC_TYPES, PluginSpec


def derive_roles(run: RunConfig) -> tuple[RunConfig, list[str]]:
    """Add the sections of roles that the algorithm needs and the config omits; returns their keys too."""
    roles, actor, updates = run.algorithm.roles(), run.actor, dict[str, Any]()
    if "critic" in roles and run.critic is None:
        updates["critic"] = CriticConfig(backend=actor.backend, optimizer=actor.optimizer, schedule=actor.schedule,
                                         max_grad_norm=actor.max_grad_norm)  # fmt: skip
    if "ref" in roles and run.ref is None:
        updates["ref"] = ReferenceConfig(backend=actor.backend)
    derived = list(updates)
    if run.reward_model is not None and run.reward_model.backend is None and run.reward_model.rollout is None:
        updates["reward_model"] = run.reward_model.model_copy(update={"backend": actor.backend})
        derived.append("reward_model.backend")
    return run.model_copy(update=updates), derived


def compose_problems(run: RunConfig, registry: Registry) -> Iterator[Problem]:
    """Yield every way in which valid sections do not go together."""
    found = plugin_sections(RunConfig, run)
    sections = [(dotted(key), registry.select(hook, section.name).spec, section) for key, hook, _, section in found]
    yield from _roles(run, registry.select("algorithms", run.algorithm.name).spec)
    yield from _rewards(run, registry)
    yield from _sizes(run)
    yield from _capabilities(run, sections, registry)
    yield from _placement(run, registry)
    yield from _snapshots(run, registry)
    checked: list[PluginConfig] = []
    for key, _, section in sections:
        if any(section is other for other in checked):  # one that derives is the same
            continue
        for problem in section.check(run, registry):
            yield Problem(key=f"{key}.{problem.key}", what=problem.what, mend=problem.mend)
        checked.append(section)


def _roles(run: RunConfig, spec: Any) -> Iterator[Problem]:
    for role in ("critic", "ref"):
        if getattr(run, role) is not None and role not in run.algorithm.roles():
            yield Problem(key=role, what=f"algorithm {run.algorithm.name!r} with these settings has no role {role}",
                          mend=f"remove the section, or set {role}=null")  # fmt: skip
    if run.actor_is_reference and run.ref is not None and run.ref.backend != run.actor.backend:
        yield Problem(key="ref.backend", what="the actor without its adapter is the reference, so ref.backend cannot "
                      "differ from actor.backend", mend="set ref=null; a backend without adapter loads a second model",
                      )  # fmt: skip
    if run.rollout is None and (spec.generates or run.data.eval is not None):
        why = "the algorithm samples from the policy" if spec.generates else "data.eval is answered by sampling"
        yield Problem(key="rollout", what=f"rollout is missing: {why}", mend="set rollout.name")
    if not run.rewards and run.reward_model is None and (spec.rewards or run.data.eval is not None):
        why = "the algorithm learns from rewards" if spec.rewards else "data.eval is judged by rewards"
        yield Problem(key="rewards", what=f"rewards are missing: {why}",
                      mend="set rewards=[{name: ...}] or reward_model.model.path")  # fmt: skip
    if run.trainer.eval_every and run.data.eval is None:
        yield Problem(key="trainer.eval_every", what="there is nothing to evaluate on", mend="add a section data.eval")
    yield from _best(run)
    late = [step for step in run.profiler.steps if step > run.trainer.steps] if run.profiler else ()
    if late:
        yield Problem(key="profiler.steps", what=f"there is no step {late[0]}; the run has {run.trainer.steps}",
                      mend="choose earlier steps, or raise trainer.steps")  # fmt: skip


def _best(run: RunConfig) -> Iterator[Problem]:
    trainer, key = run.trainer, "trainer.best_metric"
    if trainer.best_metric is None:
        if trainer.departs("best_is"):
            yield Problem(key="trainer.best_is", what="is not read without best_metric", mend=f"set {key}")
        return
    if not trainer.save_every:
        yield Problem(key=key, what="the run saves at its end alone, so nothing is chosen from",
                      mend="set trainer.save_every")  # fmt: skip
    if trainer.best_metric.startswith("eval/"):
        if run.data.eval is None:
            yield Problem(key=key, what="there is nothing to evaluate on", mend="add a section data.eval")
        elif not trainer.eval_every or trainer.save_every % trainer.eval_every:
            yield Problem(key=key, what="steps are saved that are not evaluated",
                          mend="make trainer.save_every a multiple of trainer.eval_every")  # fmt: skip


def _snapshots(run: RunConfig, registry: Registry) -> Iterator[Problem]:
    names = {model.backend.name for model in (run.actor, run.critic) if model is not None}
    for name in sorted(names) if run.trainer.save_in_background else ():
        if "backend.snapshot" not in registry.select("backends", name).spec.provides:
            yield Problem(key="trainer.save_in_background", what=f"backend {name!r} does not provide backend.snapshot",
                          mend="set it to false")  # fmt: skip


def _rewards(run: RunConfig, registry: Registry) -> Iterator[Problem]:
    labels = [reward.label or reward.name for reward in run.rewards]
    if run.reward_model is not None:
        labels.append(run.reward_model.label)
        yield from (_judge if run.reward_model.rollout else _classifier)(run.reward_model, registry)
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield Problem(key="rewards", what=f"two rewards are called {label!r}", mend="give each a label")


def _classifier(section: RewardModelConfig, registry: Registry) -> Iterator[Problem]:
    assert section.backend is not None
    name = section.backend.name
    if section.judge is not None:
        yield Problem(key="reward_model.judge", what="a classifier generates no verdict, and no rollout is selected",
                      mend="set reward_model.rollout, or remove judge")  # fmt: skip
    elif "backend.scores" not in registry.select("backends", name).spec.provides:
        yield Problem(key="reward_model.backend.name", mend="choose another backend",
                      what=f"a reward model needs backend.scores, which backend {name!r} does not provide",
                      )  # fmt: skip


def _judge(section: RewardModelConfig, registry: Registry) -> Iterator[Problem]:
    rollout, judge = section.rollout, section.judge
    assert rollout is not None
    for key in ("backend", "output", "label_index", "format", "max_tokens", "overlong"):
        if section.departs(key):
            yield Problem(key=f"reward_model.{key}", what=f"{key} is for a classifier; with a rollout the reward model "
                          "generates its verdict", mend=f"remove {key}, or rollout and judge")  # fmt: skip
    if judge is None:
        yield Problem(key="reward_model.judge", what="judge is missing: a reward model that generates has to be asked",
                      mend="set reward_model.judge.prompt")  # fmt: skip
    elif rollout.temperature == 0 and judge.departs("verdict_retries"):
        yield Problem(key="reward_model.judge.verdict_retries", mend="remove it, or raise the temperature",
                      what="with rollout.temperature 0 a verdict is the same each time")  # fmt: skip
    if "rollout.own_weights" not in registry.select("rollouts", rollout.name).spec.provides:
        yield Problem(key="reward_model.rollout.name", what="a reward model that generates needs "
                      f"rollout.own_weights, which rollout {rollout.name!r} does not provide",
                      mend=f"choose another rollout{_able(registry, 'rollout', 'rollout.own_weights')}")  # fmt: skip


def _sizes(run: RunConfig) -> Iterator[Problem]:
    batch, mini = run.data.batch_prompts, run.actor.mini_batch_prompts
    if mini is not None and batch % mini:
        sizes = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
        yield Problem(key="actor.mini_batch_prompts", mend=f"choose one of {sizes}",
                      what=f"{mini} prompts a mini-batch do not divide data.batch_prompts {batch} "
                           f"({batch} = {batch // mini} x {mini} + {batch % mini})")  # fmt: skip


def _placement(run: RunConfig, registry: Registry) -> Iterator[Problem]:
    placement, executor = run.placement, registry.select("executors", run.executor.name).spec
    if placement is None:
        return
    if "executor.placement" not in executor.provides:
        yield Problem(key="placement", what=f"executor {executor.name!r} reads no placement",
                      mend="remove the section, or choose an executor that runs on pools")  # fmt: skip
    for role in placement.roles:
        if role != "actor" and getattr(run, "reward_model" if role == "reward" else role) is None:
            yield Problem(key=f"placement.roles.{role}", what=f"this run has no role {role}", mend="remove it")
    if placement.pool_of("rollout") != placement.pool_of("actor") and run.rollout and not run.two_groups(registry):
        able = _able(registry, "hybrid engine", TWO_GROUPS)
        yield Problem(key="placement.roles.rollout", what=f"with hybrid engine {run.hybrid_engine.name!r} the rollout "
                      "gets the actor's weights within one process, so it cannot be in another pool",
                      mend=f"give rollout and actor one pool, or choose another hybrid engine{able}")  # fmt: skip


def _capabilities(
    run: RunConfig, sections: list[tuple[str, PluginSpec, PluginConfig]], registry: Registry
) -> Iterator[Problem]:
    serving = [(k, spec) for k, spec, _ in sections if k != "reward_model.rollout"]  # which serves nothing but rewards
    provided = {capability for _, spec in serving for capability in spec.provides}
    provided |= {capability for _, _, section in sections for capability in section.provided_capabilities()}
    for key, spec, section in sections:
        for capability in dict.fromkeys((*spec.requires, *section.required_capabilities())):
            kind = capability.partition(".")[0]
            if capability in provided or getattr(run, kind, kind) is None:  # whether a section may be omitted: _roles
                continue
            others = dict.fromkeys(f"{k} {s.name!r}" for k, s in serving if k.split(".")[-1] == kind)
            which = f"which {' and '.join(others)} does not provide" if others else f"and no {kind} is selected"
            yield Problem(key=f"{key}.name", what=f"{spec.noun} {spec.name!r} needs {capability}, {which}",
                          mend=f"choose another {kind}{_able(registry, kind, capability)} or {spec.noun}")  # fmt: skip


def _able(registry: Registry, kind: str, capability: str) -> str:
    """Which installed plugins of that kind provide a capability, in brackets; empty if none does."""
    specs = [spec for hook, base in SPEC_TYPES.items() if base.noun == kind for spec in registry.specs(hook)]
    names = [spec.name for spec in specs if capability in spec.provides]
    return f" ({' or '.join(names)})" if names else ""
