"""Another plugin on a higher layer, roles that derive, and what is said about it."""

from __future__ import annotations

import pytest
from little_engines import RUN, Load, Refused

from drivetrain.config.models import PlacementConfig


def test_a_name_on_a_higher_layer_drops_keys_of_the_lower_one(load: Load) -> None:
    resolved = load(
        "algorithm.name=critic", "algorithm.gamma=0.9", text=RUN.replace("group_size: 4", "group_size: 4\n  epochs: 3")
    )
    assert resolved.notes[0] == "dropped algorithm.group_size=4 (run.yaml:5): algorithm.name is now 'critic'"
    assert resolved.run.algorithm.model_dump() == {"name": "critic", "gamma": 0.9, "epochs": 3}
    assert "algorithm.group_size" not in resolved.origins


def test_a_key_of_the_same_layer_is_not_dropped(refused: Refused) -> None:
    assert refused("algorithm.name=critic", "algorithm.kl_coef=1")[0].startswith("unknown key 'kl_coef' (command line")
    assert refused(text=RUN.replace("name: group", "name: critic"))[0].startswith("unknown key 'group_size' (run.yaml")


def test_the_same_name_again_drops_nothing(refused: Refused) -> None:
    text = RUN.replace("group_size: 4", "gamma: 1")
    assert refused("algorithm.name=group", text=text)[0] == "unknown key 'gamma' (run.yaml: algorithm.gamma)"


def test_each_layer_counts(load: Load, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_ALGORITHM__NAME", "critic")
    monkeypatch.setenv("DRIVETRAIN_ALGORITHM__GAMMA", "0.5")
    resolved = load("algorithm.name=imitate")
    assert resolved.notes == (
        "dropped algorithm.group_size=4 (run.yaml:5): algorithm.name is now 'imitate'",
        "dropped algorithm.gamma=0.5 (environment DRIVETRAIN_ALGORITHM__GAMMA): algorithm.name is now 'imitate'",
    )


def test_nested_keys_and_keys_in_lists_are_dropped(load: Load) -> None:
    resolved = load("actor.optimizer.name=bare", "rewards.1.name=exact_match", "rewards.1.label=b",
                    text=RUN.replace("lr: 3e-4", "lr: 3e-4\n    betas: [0.8, 0.9]"))  # fmt: skip
    assert resolved.notes == (
        "dropped actor.optimizer.betas.0=0.8 (run.yaml:11): actor.optimizer.name is now 'bare'",
        "dropped actor.optimizer.betas.1=0.9 (run.yaml:11): actor.optimizer.name is now 'bare'",
        "dropped rewards.1.words.0='yes it is' (run.yaml:20): rewards.1.name is now 'exact_match'",
        "dropped rewards.1.words.1='no' (run.yaml:20): rewards.1.name is now 'exact_match'",
    )


def test_a_name_without_a_layer_below_it_is_strict(refused: Refused) -> None:
    text = RUN.replace("name: group\n  group_size", "group_size")
    assert refused("algorithm.name=critic", text=text)[0] == "unknown key 'group_size' (run.yaml: algorithm.group_size)"


CRITIC = (
    RUN.replace("name: group\n  group_size: 4", "name: critic")
    + """\
critic:
  backend: {name: mini}
  optimizer: {name: bare, lr: 0.1}
"""
)
REFERENCE = RUN.replace("group_size: 4", "kl_coef: 0.1") + "ref: {backend: {name: mini}}\n"


def test_a_critic_goes_with_its_algorithm(load: Load, refused: Refused) -> None:
    assert load(text=CRITIC).run.critic is not None
    resolved = load("algorithm.name=group")
    assert resolved.run.critic is None
    assert resolved.notes == (
        "dropped critic.backend.name='mini' (run.yaml:22): algorithm 'group' has no role critic",
        "dropped critic.optimizer.name='bare' (run.yaml:23): algorithm 'group' has no role critic",
        "dropped critic.optimizer.lr=0.1 (run.yaml:23): algorithm 'group' has no role critic",
    )
    assert refused("algorithm.name=group", "critic.max_grad_norm=2")[0] == (
        "algorithm 'group' with these settings has no role critic (command line: critic)")  # fmt: skip


def test_a_reference_goes_with_its_algorithm_and_stays_with_settings_that_need_it(load: Load, refused: Refused) -> None:
    assert load(text=REFERENCE).run.ref is not None
    assert load("algorithm.name=critic").run.ref is None
    assert "has no role ref" in refused("algorithm.kl_coef=0")[0]
    assert "has no role ref" in refused("algorithm.name=group", "algorithm.kl_coef=0")[0], "the name did not change"


def test_roles_derive_from_the_actor_and_it_is_said(load: Load) -> None:
    resolved = load("algorithm.kl_coef=0.1")
    assert resolved.notes == ("role ref derives from actor",)
    assert resolved.run.ref is not None and resolved.run.ref.backend == resolved.run.actor.backend
    assert str(resolved.origins["ref"]) == "derived from actor"
    resolved = load("algorithm.name=critic", "actor.optimizer.momentum=0.5")
    assert resolved.notes[-1] == "role critic derives from actor"
    assert resolved.run.critic is not None
    assert resolved.run.critic.optimizer == resolved.run.actor.optimizer
    assert resolved.run.critic.optimizer.momentum == 0.5  # type: ignore[attr-defined]


def test_a_role_that_names_no_backend_has_from_the_actor_what_it_does_not_set(load: Load, refused: Refused) -> None:
    words = ["algorithm.name=critic", "actor.backend.sharding.ranks=2", "actor.schedule.name=cosine"]
    resolved = load(*words, "critic.backend.plan.count=3", "critic.max_grad_norm=null", "critic.optimizer.lr=1")
    actor, critic = resolved.run.actor, resolved.run.critic
    assert "role critic derives from actor, but for what is set" in resolved.notes and critic is not None
    assert critic.backend.model_dump() == {**actor.backend.model_dump(), "plan": {"kind": "parts", "count": 3}}
    assert (critic.optimizer.lr, critic.max_grad_norm, critic.schedule) == (1, None, actor.schedule)
    assert resolved.origin("critic.backend.plan") == "command line"
    assert resolved.origin("critic.backend.name") == "derived from actor"
    bare = load(*words, "critic.optimizer={name: bare, lr: 0.5}").run.critic
    assert bare is not None and bare.backend == actor.backend and bare.optimizer.model_dump()["name"] == "bare"
    assert refused(*words, "critic.backend.name=mini", "critic.max_grad_norm=1")[0].startswith("optimizer is missing")


def test_what_the_actor_drops_no_role_derives(load: Load) -> None:
    text = RUN.replace("{name: mini}", "{name: mini, offlod: true}").replace("group_size: 4", "kl_coef: 0.1")
    resolved = load("actor.backend.name=able", "ref.backend.adapter=true", text=text)
    assert resolved.run.ref is not None
    assert resolved.run.ref.backend.model_dump() == {**resolved.run.actor.backend.model_dump(), "adapter": True}
    assert "dropped ref.backend.offlod=True (derived from actor): ref.backend.name is now 'able'" in resolved.notes


def test_an_actor_with_an_adapter_is_the_reference_and_it_is_said(load: Load, refused: Refused) -> None:
    said = "role ref is the actor without its adapter"
    adapted = ("algorithm.kl_coef=0.1", "actor.backend.adapter=true")
    resolved = load(*adapted)
    assert resolved.notes == ("role ref derives from actor", said) and resolved.run.actor_is_reference
    for others in (
        ("ref.backend.name=mini", "ref.backend.adapter=true", "ref.model.path=other"),  # a model of its own
        ("ref.backend.name=mini",),  # a backend without adapter
    ):
        resolved = load(*adapted, *others)
        assert resolved.notes == () and not resolved.run.actor_is_reference
    assert not load("algorithm.kl_coef=0.1").run.actor_is_reference
    assert not load("actor.backend.adapter=true").run.actor_is_reference, "there is no reference"
    same = ("ref.backend.name=mini", "ref.backend.adapter=true")
    assert load(*adapted, *same).notes == (said,)
    assert refused(*adapted, *same, "ref.backend.plan.count=2")[0] == (
        "the actor without its adapter is the reference, so ref.backend cannot differ from actor.backend"
        " (command line: ref.backend)")  # fmt: skip


def test_a_reference_in_a_pool_of_its_own_is_a_model_of_its_own(load: Load) -> None:
    run = load("algorithm.kl_coef=0.1", "actor.backend.adapter=true").run
    for pool, together in (("one", True), ("two", False)):
        placement = PlacementConfig(pools={"one": (1,), "two": (1,)}, roles={"actor": "one", "ref": pool,
                                                                             "critic": "two"})  # fmt: skip
        assert run.model_copy(update={"placement": placement}).actor_is_reference == together


def test_the_processes_of_a_role_are_those_of_its_pool_or_the_executors(load: Load) -> None:
    run = load().run
    assert run.processes_of("actor") is None, "one process, whatever the program around it makes of it"
    many = run.executor.model_copy(update={"processes": 4})
    assert run.model_copy(update={"executor": many}).processes_of("critic") == 4
    placement = PlacementConfig(pools={"one": (2, 2), "two": (1,)}, roles={"actor": "one", "critic": "two"})
    placed = run.model_copy(update={"placement": placement})
    assert [placed.processes_of(role) for role in ("actor", "ref", "critic")] == [4, 4, 1]


def test_settings_may_provide_what_others_require(load: Load, refused: Refused) -> None:
    needs = ("algorithm.name=imitate", "algorithm.needs_reference=true")
    assert "needs backend.reference" in refused(*needs)[0]
    assert load(*needs, "actor.backend.adapter=true")


def test_the_backend_of_a_reward_model_derives_from_the_actor(load: Load) -> None:
    resolved = load("actor.backend.name=able", "actor.backend.offload=false", "reward_model.model.path=judge")
    assert resolved.notes == ("reward_model.backend derives from actor",)
    assert resolved.run.reward_model is not None
    assert resolved.run.reward_model.backend == resolved.run.actor.backend
    assert resolved.origin("reward_model.backend.name") == "derived from actor"


def test_an_algorithm_that_does_not_sample_needs_no_rollout_and_no_rewards(load: Load) -> None:
    resolved = load("algorithm.name=imitate", "rollout=null", "rewards=[]")
    assert resolved.run.rollout is None and resolved.run.rewards == ()


def test_a_distribution_may_be_picked(load: Load) -> None:
    run = load("algorithm.name=acme-engines:group").run
    assert (run.algorithm.name, run.algorithm.group_size) == ("acme-engines:group", 4)  # type: ignore[attr-defined]


def test_the_default_of_a_section_may_be_switched(refused: Refused) -> None:
    assert refused("hybrid_engine.name=other")[0] == "unknown hybrid engine 'other' (command line: hybrid_engine.name)"
