"""What is refused, and in what words: what is wrong, file and key, what to do."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from little_engines import RUN, Load, Program, Refused

from drivetrain.config.resolve import load_config
from drivetrain.errors import ConfigError, UserError
from drivetrain.seam.registry import Registry

TRAINER_KEYS = (
    "steps, seed, run_dir, eval_every, save_every, save_in_background, log_every, keep_checkpoints, best_metric, "
    "best_is, health, eval"
)


def without(section: str) -> str:
    """The config less a top section."""
    lines, keep, out = RUN.splitlines(), True, []
    for line in lines:
        if not line.startswith((" ", "-")):
            keep = not line.startswith(f"{section}:")
        out += [line] * keep
    return "\n".join(out)


@pytest.mark.parametrize(
    ("override", "lines"),
    [
        ("trainer.stepz=1", ["unknown key 'stepz' (command line: trainer.stepz)", "  did you mean steps?",
                             f"  known keys: {TRAINER_KEYS}"]),
        ("train.steps=1", ["unknown key 'train' (command line: train)", "  did you mean trainer?"]),
        ("algorithm.gamma=1", ["unknown key 'gamma' (command line: algorithm.gamma)",
                               "  known keys: name, group_size, kl_coef, epochs, extras"]),
        ("actor.backend.sharding.rank=2", ["unknown key 'rank' (command line: actor.backend.sharding.rank)",
                                           "  did you mean ranks?", "  known keys: ranks"]),
        ("actor.backend.plan={kind: parts, n: 2}", ["unknown key 'n' (command line: actor.backend.plan.n)",
                                                    "  known keys: kind, count"]),
        ("trainer.steps=ten", ["input should be a valid integer, unable to parse string as an integer, got 'ten' "
                               "(command line: trainer.steps)", "  steps: Steps of the run."]),
        ("trainer.steps=", ["input should be a valid integer, got None (command line: trainer.steps)",
                            "  steps: Steps of the run."]),
        ("algorithm.group_size=1", ["input should be greater than or equal to 2, got 1 "
                                    "(command line: algorithm.group_size)", "  group_size: Samples of a prompt."]),
        ("model.dtype=float8", ["input should be 'float32', 'bfloat16' or 'float16', got 'float8' "
                                "(command line: model.dtype)", "  dtype: Type that weights are held in."]),
        ("data.template=plain", ["template lacks {prompt} (command line: data)"]),
        ("rollout.min_response_tokens=9", [
            "min_response_tokens 9 exceeds max_response_tokens 5 (command line: rollout)"]),
        ("algorithm=critic", ["'critic' is no section (command line: algorithm)", "  write algorithm.name=critic"]),
        ("rewards=words", ["rewards takes a list, got 'words' (command line: rewards)"]),
        ("rewards={name: words}", ["rewards takes a list, got a section (command line: rewards)"]),
        ("data=5", ["data takes a section, got 5 (command line: data)"]),
        ("rewards.3.weight=1", [
            "rewards has no element 2, so it cannot have an element 3 (command line: rewards.3.weight)",
            "  elements count from 0"]),
        ("rewards.1.words.0={a: 1}", [
            "input should be a valid string, got a section (command line: rewards.1.words.0)"]),
        ("algorithm.name=", ["algorithm has no name (command line: algorithm.name)",
                             "  name one of: critic, group, heavy, imitate, unsound"]),
        ("actor.mini_batch_prompts=6", [
            "6 prompts a mini-batch do not divide data.batch_prompts 16 (16 = 2 x 6 + 4) "
            "(command line: actor.mini_batch_prompts)", "  choose one of 1, 2, 4, 8, 16"]),
        ("rollout.name=mute", ["algorithm 'group' needs rollout.log_probs, which rollout 'mute' does not provide "
                               "(run.yaml: algorithm.name)", "  choose another rollout (say) or algorithm"]),
        ("actor.backend.name=frozen", [
            "algorithm 'group' needs backend.train, which actor.backend 'frozen' does not provide "
            "(run.yaml: algorithm.name)", "  choose another backend (able or mini) or algorithm"]),
        ("actor.backend.offload=true", [
            "backend 'mini' needs hardware.spare_memory, which hardware 'auto' does not provide "
            "(run.yaml: actor.backend.name)", "  choose another hardware or backend"]),
        ("rollout.temperature=0", ["samples of a group are all alike (run.yaml: algorithm.group_size)",
                                   "  raise the temperature"]),
        ("rewards=[]", ["rewards are missing: the algorithm learns from rewards (command line: rewards)",
                        "  set rewards=[{name: ...}] or reward_model.model.path"]),
        ("rewards.1={name: exact_match}", ["two rewards are called 'exact_match' (command line: rewards)",
                                           "  give each a label"]),
        ("trainer.eval_every=5", ["there is nothing to evaluate on (command line: trainer.eval_every)",
                                  "  add a section data.eval"]),
        ("trainer.save_in_background=true", [
            "backend 'mini' does not provide backend.snapshot (command line: trainer.save_in_background)",
            "  set it to false"]),
        ("rollout=null", ["rollout is missing: the algorithm samples from the policy (command line: rollout)",
                          "  set rollout.name"]),
        ("ref={backend: {name: mini}}", ["algorithm 'group' with these settings has no role ref (command line: ref)",
                                         "  remove the section, or set ref=null"]),
        ("steps", ["'steps' is not of the form section.key=value (command line)",
                   "  what to do   for example trainer.steps=10"]),
        ("a..b=1", ["'a..b=1' is not of the form section.key=value (command line)"]),
        ("trainer.steps=[1", ["the value '[1' is not valid YAML (command line: trainer.steps)",
                              "  what to do   quote it"]),
        ("algorithm.name=unsound", ["the config model of algorithm 'unsound' does not derive from "
                                    "drivetrain.AlgorithmConfig (command line: algorithm.name)", "  tell its author"]),
        ("algorithm.name=heavy", [
            "algorithm 'heavy' of acme-engines 1.0 does not import: ModuleNotFoundError: No module named "
            "'acme_engines.gone' (command line: algorithm.name)",
            "  mend or reinstall acme-engines; --traceback shows where"]),
    ],
)  # fmt: skip
def test_one_mistake_on_the_command_line(refused: Refused, override: str, lines: list[str]) -> None:
    assert refused(override)[: len(lines)] == lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (without("model"), ["model is missing (run.yaml: model)", "  add model"]),
        (without("algorithm"), ["algorithm is missing (run.yaml: algorithm)",
                                "  name one of: critic, group, heavy, imitate, unsound"]),
        (without("rewards"), ["rewards are missing: the algorithm learns from rewards (run.yaml: rewards)"]),
        (RUN.replace("name: group", "kl_coef: 0"), ["algorithm has no name (run.yaml: algorithm.name)"]),
        (RUN.replace("    lr: 3e-4\n", ""), ["lr is missing (run.yaml: actor.optimizer.lr)",
                                             "  lr: Learning rate, before the schedule."]),
        (RUN.replace("group_size", "group_sise"), ["unknown key 'group_sise' (run.yaml: algorithm.group_sise)",
                                                   "  did you mean group_size?"]),
        (RUN.replace("name: group", "name: imitate"), ["unknown key 'group_size' (run.yaml: algorithm.group_size)",
                                                       "  known keys: name, epochs, needs_reference"]),
        (RUN.replace("name: group", "name: gruop"), [
            "unknown algorithm 'gruop' (run.yaml: algorithm.name)", "  did you mean   group",
            "  did you mean   grpo (not installed: pip install drivetrain-algo-grpo)",
            "  installed      critic (acme-engines 1.0)"]),
        (RUN + "trainer: {steps: 1}\n", ["a key stands twice in one section (run.yaml:22: trainer)",
                                         "  what to do   keep one of them"]),
        (RUN.replace("steps: 10", "steps: 10\n  steps: 10"),
         ["a key stands twice in one section (run.yaml:22: trainer.steps)", "  what to do   keep one of them"]),
        (RUN.replace("group_size: 4", "group_size: [4"), [
            "not valid YAML: expected ',' or ']', but got ':' (run.yaml:6)", "  what to do   mend the file"]),
        (RUN.replace("group_size: 4", "epochs: !!python/name:os.system"), [
            "not valid YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:os.system' "
            "(run.yaml:5)"]),
        (RUN.replace("some/model", "2024-13-45"), ["not valid YAML: month must be in 1..12 (run.yaml)"]),
        ("- a\n- b\n", ["the config is not a mapping of sections (run.yaml)", "  what to do   start with `model:`"]),
    ],
)  # fmt: skip
def test_one_mistake_in_the_file(refused: Refused, text: str, lines: list[str]) -> None:
    assert refused(text=text)[: len(lines)] == lines


JUDGE = "reward_model={model: {path: judge}, backend: {name: judge}%s}"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (JUDGE % "", ""),
        ("reward_model={model: {path: judge}}",
         "a reward model needs backend.scores, which backend 'mini' does not provide (command line: "
         "reward_model.backend.name)"),
        (JUDGE % ", label: words", "two rewards are called 'words' (run.yaml: rewards)"),
        (JUDGE % ", label_index: -1", "input should be greater than or equal to 0, got -1 (command line: "
                                      "reward_model.label_index)"),
        (JUDGE % ", output: odds", "input should be 'logit', 'probability' or 'log_odds', got 'odds' (command line: "
                                   "reward_model.output)"),
        ("reward_model={model: {path: judge, init: random}, backend: {name: judge}}",
         "a reward model is read from its folder; model.init is pretrained (command line: reward_model)"),
    ],
)  # fmt: skip
def test_a_reward_model(load: Load, refused: Refused, override: str, line: str) -> None:
    if line:
        assert refused(override)[0] == line
    else:
        assert load(override, "rewards=[]").run.reward_model is not None


SPEAKER = "reward_model={model: {path: judge}, rollout: {name: say, max_response_tokens: 4, temperature: 0}%s}"
ASKED = ", judge: {prompt: '{response}'%s}"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (SPEAKER % (ASKED % ""), ""),
        (SPEAKER % "", "judge is missing: a reward model that generates has to be asked (command line: "
                       "reward_model.judge)"),
        (SPEAKER % (ASKED % "" + ", output: probability"), "output is for a classifier; with a rollout the reward "
         "model generates its verdict (command line: reward_model.output)"),
        (SPEAKER % (ASKED % "" + ", backend: {name: judge}"), "backend is for a classifier; with a rollout the reward "
         "model generates its verdict (command line: reward_model.backend)"),
        (JUDGE % (ASKED % ""), "a classifier generates no verdict, and no rollout is selected (command line: "
                               "reward_model.judge)"),
        (SPEAKER % (ASKED % ", verdict_retries: 3"), "with rollout.temperature 0 a verdict is the same each time "
         "(command line: reward_model.judge.verdict_retries)"),
        (SPEAKER.replace("say", "mute") % (ASKED % ""), "a reward model that generates needs rollout.own_weights, "
         "which rollout 'mute' does not provide (command line: reward_model.rollout.name)"),
        (SPEAKER % ", judge: {prompt: 'How good?'}", "prompt lacks {response} (command line: reward_model.judge)"),
        (SPEAKER % (ASKED % ", pattern: '('"), "pattern is no regular expression: missing ), unterminated subpattern "
         "at position 0 (command line: reward_model.judge)"),
        (SPEAKER % (ASKED % ", min: 1, max: 1"), "min 1 is not below max 1 (command line: reward_model.judge)"),
        (SPEAKER % (ASKED % ", patern: x"), "unknown key 'patern' (command line: reward_model.judge.patern)"),
        (SPEAKER % (ASKED % "" + ", label: words"), "two rewards are called 'words' (run.yaml: rewards)"),
    ],
)  # fmt: skip
def test_a_reward_model_that_generates(load: Load, refused: Refused, override: str, line: str) -> None:
    if line:
        assert refused(override)[0] == line
    else:
        resolved = load(override, "rewards=[]")
        assert resolved.run.reward_model is not None and resolved.run.reward_model.backend is None
        assert not resolved.notes


def test_what_the_rollout_of_a_reward_model_can_is_of_no_use_to_the_policy(refused: Refused) -> None:
    assert refused(SPEAKER % (ASKED % ""), "rollout.name=mute")[0] == (
        "algorithm 'group' needs rollout.log_probs, which rollout 'mute' does not provide (run.yaml: algorithm.name)"
    )


def test_an_empty_file_lacks_everything(refused: Refused) -> None:
    lines = refused(text="")
    assert lines[0] == "5 problems in the config"
    assert [line for line in lines if "missing" in line] == [
        f"  {section} is missing ({section})" for section in ("model", "algorithm", "actor", "data", "trainer")
    ]


def test_files_that_cannot_be_read(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the config: No such file or directory \(.*gone.yaml\)"):
        load_config(tmp_path / "gone.yaml", [], registry)
    with pytest.raises(UserError, match="cannot read the config: Is a directory"):
        load_config(tmp_path, [], registry)
    (tmp_path / "latin.yaml").write_bytes("model: {path: caf\xe9}".encode("latin-1"))
    with pytest.raises(UserError, match="not valid YAML: 'utf-8' codec can't decode"):
        load_config(tmp_path / "latin.yaml", [], registry)


@pytest.mark.parametrize(
    ("variable", "value", "lines"),
    [
        ("DRIVETRAIN_STEPS", "3", ["unknown key 'steps' (environment DRIVETRAIN_STEPS: steps)"]),
        ("DRIVETRAIN_TRAINER__STEPZ", "3", [
            "unknown key 'stepz' (environment DRIVETRAIN_TRAINER__STEPZ: trainer.stepz)", "  did you mean steps?"]),
        ("DRIVETRAIN_TRAINER__STEPS", "ten", [
            "input should be a valid integer, unable to parse string as an integer, got 'ten' "
            "(environment DRIVETRAIN_TRAINER__STEPS: trainer.steps)"]),
        ("DRIVETRAIN_REWARDS", "[", ["the value '[' is not valid YAML (environment DRIVETRAIN_REWARDS)"]),
    ],
)  # fmt: skip
def test_one_mistake_in_the_environment(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, lines: list[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert refused()[: len(lines)] == lines


def test_all_mistakes_are_told_at_once(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_TRAINER__SEED", "-1")
    text = RUN.replace("group_size: 4", "group_size: 1\n  gamma: 2").replace("lr: 3e-4", "lr: fast")
    assert refused("trainer.stepz=1", "actor.mini_batch_prompts=5", text=text) == [
        "5 problems in the config",
        "  input should be greater than or equal to 2, got 1 (run.yaml: algorithm.group_size)",
        "    group_size: Samples of a prompt.",
        "  unknown key 'gamma' (run.yaml: algorithm.gamma)",
        "    known keys: name, group_size, kl_coef, epochs, extras",
        "  input should be a valid number, unable to parse string as a number, got 'fast' "
        "(run.yaml: actor.optimizer.lr)",
        "    lr: Learning rate, before the schedule.",
        "  input should be greater than or equal to 0, got -1 (environment DRIVETRAIN_TRAINER__SEED: trainer.seed)",
        "    seed: Every random number of the run derives from it.",
        "  unknown key 'stepz' (command line: trainer.stepz)",
        "    did you mean steps?",
        f"    known keys: {TRAINER_KEYS}",
    ]


def test_sections_are_composed_without_what_is_wrong(refused: Refused) -> None:
    lines = refused("trainer.stepz=1", "actor.mini_batch_prompts=5", "rollout.name=mute")
    assert lines[0] == "3 problems in the config"
    assert [line[2:22] for line in lines if line.startswith("  ") and line[2] != " "] == [
        "unknown key 'stepz' ", "5 prompts a mini-bat", "algorithm 'group' ne"]  # fmt: skip


def test_the_cause_of_a_broken_plugin_is_chained(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"unknown algorithm 'broken' \(command line: algorithm.name\)") as raised:
        load("algorithm.name=broken")
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)
    assert "not loadable   broken (acme-broken 1.0 does not import: ModuleNotFoundError" in str(raised.value)


def test_one_layer_sets_a_key_by_its_name_and_by_an_alias(refused: Refused) -> None:
    assert refused("their.optim.lr=1", "actor.optimizer.lr=2") == [
        "actor.optimizer.lr is set a second time (command line: their.optim.lr)", "  keep one of them"]  # fmt: skip


def test_evaluation_needs_a_rollout_and_rewards(refused: Refused) -> None:
    text = RUN.replace("name: group\n  group_size: 4", "name: imitate")
    evaluate = "data.eval={name: jsonl, path: eval.jsonl}"
    assert refused(evaluate, "rollout=null", "rewards=[]", text=text)[1::2] == [
        "  rollout is missing: data.eval is answered by sampling (command line: rollout)",
        "  rewards are missing: data.eval is judged by rewards (command line: rewards)",
    ]


def test_errors_cross_processes(load: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        load("trainer.steps=ten", "trainer.stepz=1")
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    error = UserError("a", where="b", mend="c", details=[("d", "e")])
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "a (b)\n  d            e\n  what to do   c"


def test_the_program_answers_the_users_mistakes_with_two(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["config", "run.yaml", "trainer.steps=ten"], ["config", "gone.yaml"], ["train", "run.yaml", "x"]):
        assert program(*words) == 2
        told = capsys.readouterr()
        assert told.out == "" and told.err.startswith("error: ") and "Traceback" not in told.err
    assert program("config", "run.yaml", "algorithm.name=broken", "--traceback") == 2
    told = capsys.readouterr()
    assert "ModuleNotFoundError: No module named 'missing_engine'" in told.err and "Traceback" in told.err
    assert program("cofnig", "run.yaml") == 2
    assert program("plugins", "--json") == 0
    assert {"name": "broken", "status": "broken"}.items() <= max(
        json.loads(capsys.readouterr().out), key=lambda row: row["name"] == "broken").items()  # fmt: skip
