"""Settings: what config.yaml holds, what is refused and how, and what verl is told."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from empo2.recipe.config import DEFAULTS, Settings, load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.trainer.verl_config import build_verl_config, read_settings

PROFILES = ("gpu", "gpu-1", "gpu-24", "cpu")


def refused(*overrides: str, profile: str | None = None, **layers: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(profile, overrides, **layers)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_profiles_are_valid() -> None:
    assert set(yaml.safe_load(DEFAULTS.read_text())["profiles"]) == set(PROFILES)
    for profile in PROFILES:
        assert load_settings(profile).to_dict().keys() == Settings.model_fields.keys()


def test_a_profile_plays_scienceworld_unless_other_tasks_are_given() -> None:
    """Nothing of ScienceWorld is left for others: without it, the profile gpu is what stands in config.yaml."""
    mine = {"agent": {"class": "mine:Agent"}, "tasks": {"source": "mine:load"}}
    assert load_settings("gpu", layer=mine) == load_settings(layer=mine)
    played = load_settings("cpu")
    assert played.agent.class_ == "empo2.agents.scienceworld.agent:ScienceWorldAgent"
    assert (played.algorithm.success_return, played.algorithm.failure_return) == (100, -100)
    assert (played.memory.scope, played.tasks.args["names"]) == (["task", "variation"], ["find-animal"])
    assert load_settings("cpu", ["tasks.source=empo2.agents.scienceworld.tasks:load"]) == played
    for other in (load_settings("cpu", layer=mine), load_settings()):
        assert (other.agent.env, other.tasks.args, other.memory.scope) == ({}, {}, "all-tasks")
        assert (other.algorithm.success_return, other.algorithm.failure_return) == (1, 0)
        assert other.algorithm.novelty_similarity == 0.98


def test_scienceworlds_rewards_are_weighed_as_in_the_paper() -> None:
    """1/n beside -100..100, as -1..1; a difference below half of a new state is none. To the last bit."""
    for profile in PROFILES:
        algorithm = load_settings(profile).algorithm
        assert (algorithm.scale, algorithm.new_state_reward, algorithm.tolerance) == (0.01, 1.0, 0.5)


def test_layers_in_their_order(tmp_path: Path) -> None:
    """Profile, then file, then mapping, then arguments."""
    file = tmp_path / "mine.yaml"
    file.write_text("algorithm: {seed: 11, tasks_per_step: 3, clip_low: 0.1, rollouts_per_task: 6}")
    settings = load_settings(
        "cpu",
        ["algorithm.seed=33"],
        file=file,
        layer={"algorithm": {"seed": 22, "tasks_per_step": 5}},
    ).algorithm
    assert (settings.seed, settings.tasks_per_step, settings.clip_low, settings.rollouts_per_task) == (33, 5, 0.1, 6)
    assert settings.learning_rate == 1e-5  # the profile's
    assert settings.clip_high == 0.3  # config.yaml's


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "+1e-6", "0.000001"])
def test_yaml_reads_1e_6_as_text_and_we_do_not(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"algorithm: {{learning_rate: {text}}}")
    assert load_settings(file=file).algorithm.learning_rate == 1e-6
    assert load_settings(None, [f"algorithm.learning_rate={text}"]).algorithm.learning_rate == 1e-6


@pytest.mark.parametrize("text", ["${Q}", "cost: ${ 5 or", "a e-6", "e5", "nan", "???"])
def test_texts_stay_as_they_are(text: str) -> None:
    assert load_settings(layer={"agent": {"env": {"X": text}}}).agent.env["X"] == text
    assert load_settings(None, [f"agent.env.X={text!r}"]).agent.env["X"] == text


@pytest.mark.parametrize("argument", ["algorithm.learning_rate=inf", "algorithm.kl_coefficient=nan"])
def test_numbers_must_be_finite(argument: str) -> None:
    assert argument.split("=")[0] in refused(argument)


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("algorithm.learning_rte=1", "algorithm.learning_rate"),
        ("learning_rate=1", "algorithm.learning_rate"),
        ("memory.mask_threshold=0.1", "algorithm.mask_threshold"),
        ("algoritm.seed=1", "algorithm"),
    ],
)
def test_unknown_key_suggests_the_nearest(argument: str, nearest: str) -> None:
    message = refused(argument)
    assert message.startswith(argument.split("=")[0].split(".")[0])
    assert f"did you mean {nearest}?" in message


def test_unknown_key_like_no_other() -> None:
    assert "config.yaml" in refused("zzz.qqq=1")


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("algorithm.seed=1.5", ["algorithm.seed=1.5", "integer"]),
        ("algorithm.intrinsic_coefficient=1.0", ["algorithm.intrinsic_coefficient=1.0", "less than or equal to 0.5"]),
        ("algorithm.mode_per=rollout", ["algorithm.mode_per='rollout'", "'step' or 'group'"]),
        ("run.validate_first=1", ["run.validate_first=1", "boolean"]),
        ("model.path=3", ["model.path=3", "string"]),
        ("agent.class=no-colon", ["agent.class='no-colon'", "pattern"]),
        ("memory.scope=task", ["memory.scope='task': must be all-tasks, or a list", "[task, variation]"]),
        ("memory.scope=[1]", ["memory.scope=[1]: must be all-tasks, or a list"]),
        ("memory.state=regex:(", ["memory.state='regex:('", "not a regular expression"]),
        ("tasks.source=x", ["tasks.source='x'", "hub:NAME"]),
        ("algorithm=1", ["algorithm=1", "is a section", "algorithm.name"]),
        ("agent=", ["agent=None", "is a section", "agent.class"]),
        ("algorithm.seed", ["'algorithm.seed'", "key=value"]),
        ("=1", ["'=1'", "key=value"]),
        ("run.name=[", ["run.name=[", "not YAML"]),
    ],
)
def test_wrong_values_name_key_and_value(argument: str, parts: list[str]) -> None:
    message = refused(argument)
    for part in parts:
        assert part in message


def test_all_wrong_values_at_once() -> None:
    message = refused("algorithm.seed=x", "gateway.port=-1", "algorithm.sead=1")
    assert "algorithm.seed='x'" in message
    assert "gateway.port=-1" in message
    assert "algorithm.sead=1: there is no such setting; did you mean algorithm.seed?" in message


def test_unknown_profile() -> None:
    message = refused(profile="tpu")
    assert "'tpu'" in message
    assert all(profile in message for profile in PROFILES)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        ("a: [", "not YAML"),
        ("- 1", "must be a mapping"),
        ("", "must be a mapping"),
        ("algorithm: {sed: 1}", "algorithm.sed=1: there is no such setting; did you mean algorithm.seed?"),
        ("algorithm: 5", "algorithm=5: is a section"),
    ],
)
def test_file_errors(content: str | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_text(content)
    message = refused(file=file)
    assert reason in message


def test_open_sections_take_any_key() -> None:
    settings = load_settings("gpu", ["agent.env.MY_VARIABLE=input.task", "tasks.args.level=3", "verl.trainer.nnodes=2"])
    assert settings.agent.env["MY_VARIABLE"] == "input.task"
    assert "SCIENCEWORLD_TASK" in settings.agent.env
    assert settings.tasks.args["level"] == 3
    assert settings.verl == {"trainer": {"nnodes": 2}}


def test_another_agent_does_not_inherit_variables() -> None:
    settings = load_settings("cpu", layer={"agent": {"class": "mine:Agent", "env": {"LEVEL": "input.level"}}})
    assert settings.agent.env == {"LEVEL": "input.level"}
    assert settings.tasks.args["names"]  # the tasks are still ScienceWorld's


def test_another_agent_for_the_same_tasks_gets_their_variables() -> None:
    """As the frameworks of docs/agents.md, which are given by their class alone."""
    settings = load_settings("cpu", ["agent.class=empo2.agents.frameworks.langgraph:LangGraphAgent"])
    assert settings.agent.env == load_settings("cpu").agent.env != {}


def test_a_class_may_be_written_with_dots() -> None:
    assert load_settings(None, ["agent.class=my.agents.Player"]).agent.name == "my.agents:Player"
    with pytest.raises(ConfigError, match=r"agent\.class=None: give the agent, module:Class"):
        _ = load_settings().agent.name


def test_another_task_source_does_not_inherit_arguments() -> None:
    settings = load_settings("cpu", ["tasks.source=mine:load", "tasks.args.level=3"])
    assert settings.tasks.args == {"level": 3}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.max_context_tokens=5000"], "model.max_context_tokens=5000"),
        (["hardware.tensor_parallel=3"], "hardware.tensor_parallel=3"),
        (["algorithm.updates_per_step=17"], "algorithm.updates_per_step=17"),
        (["algorithm.success_return=0"], "algorithm.success_return=0: must exceed failure_return=0"),
        (
            ["algorithm.tasks_per_step=3", "algorithm.updates_per_step=1", "algorithm.rollouts_per_task=3"],
            "tasks_per_step=3",
        ),
    ],
)
def test_values_that_do_not_go_together(overrides: list[str], key: str) -> None:
    assert key in refused(*overrides)


def test_to_dict_can_be_laid_over_the_defaults_again() -> None:
    settings = load_settings("cpu", ["tasks.args.level=3"])
    assert load_settings(layer=settings.to_dict()) == settings


# verl's configuration


def composed(profile: str, *overrides: str, **layers: Any) -> Any:
    return build_verl_config(
        load_settings(profile, overrides, **layers),
        model_path="/models/m",
        run_directory=Path("/runs/demo"),
        gateway_url="http://127.0.0.1:1",
        gateway_key="secret",
    )


def test_settings_of_a_configuration_written_for_agent_lightning() -> None:
    """Without a section ``empo2`` the sizes of a step are those that verl's sections say."""
    config = composed("cpu", "algorithm.tasks_per_step=6", "algorithm.updates_per_step=3")
    del config.empo2
    algorithm = read_settings(config).algorithm
    assert (algorithm.tasks_per_step, algorithm.rollouts_per_task, algorithm.updates_per_step) == (6, 4, 3)
    assert (algorithm.success_return, algorithm.failure_return, algorithm.scale) == (1, 0, 1)
    config = composed("gpu", "algorithm.tasks_per_step=6", "algorithm.updates_per_step=3")
    config.empo2 = {"algorithm": {"updates_per_step": 2, "seed": 5}, "run_directory": "runs/x"}
    algorithm = read_settings(config).algorithm
    assert (algorithm.tasks_per_step, algorithm.updates_per_step, algorithm.seed) == (6, 2, 5)


ASYNC = "verl.agentlightning.async_rollout.enabled=true"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "async_train_batch_size=None"),
        (["verl.agentlightning.async_rollout.async_train_batch_size=16"], "async_train_batch_size=16"),
        (["verl.agentlightning.async_rollout.async_train_batch_size=17"], "algorithm.mode_per='step'"),
        (
            [
                "verl.agentlightning.async_rollout.async_train_batch_size=17",
                "algorithm.mode_per=group",
                "algorithm.off_policy_old_log_probs=tip-free",
            ],
            "algorithm.off_policy_old_log_probs='tip-free'",
        ),
    ],
)
def test_asynchronous_rollouts_refuse_what_they_cannot_be_right_with(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed("gpu", ASYNC, *overrides)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_asynchronous_rollouts_of_a_group_each_and_of_grpo_are_accepted() -> None:
    size = "verl.agentlightning.async_rollout.async_train_batch_size=32"
    for chosen in ("algorithm.mode_per=group", "algorithm.name=grpo"):
        assert composed("gpu", ASYNC, size, chosen).agentlightning.async_rollout.enabled


def test_hydras_prefix_in_omegaconfs_list() -> None:
    """As a script merges it: ``+empo2`` would be a section of that name, which nothing reads."""
    config = composed("cpu")
    OmegaConf.set_struct(config, False)
    wrong = OmegaConf.merge(config, OmegaConf.from_dotlist(["+empo2.algorithm.seed=5"]))
    with pytest.raises(ConfigError, match=r"^\+empo2: the \+ belongs to Hydra's.* Write empo2\.KEY=VALUE$"):
        read_settings(wrong)  # pyright: ignore[reportArgumentType]
    right = OmegaConf.merge(config, OmegaConf.from_dotlist(["empo2.algorithm.seed=5"]))
    assert read_settings(right).algorithm.seed == 5  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("profile", PROFILES)
def test_translation(profile: str) -> None:
    """What the settings do not say is verl's default, as long as that is what the objective needs."""
    settings, config = load_settings(profile), composed(profile)
    assert read_settings(config) == settings
    # A run can be made again from what verl was given.
    given: Any = OmegaConf.to_container(config.empo2)
    assert given.pop("run_directory") == "/runs/demo"
    assert load_settings(layer=given) == settings
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert actor.optim.lr == settings.algorithm.learning_rate
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.3, 10.0)
    assert (actor.ppo_epochs, actor.shuffle, actor.policy_loss.loss_mode) == (1, False, "per_rollout_mean")
    assert (actor.use_kl_loss, actor.entropy_coeff, actor.calculate_entropy) == (False, 0, False)
    assert (actor.strategy, config.actor_rollout_ref.ref.strategy) == ("fsdp2", "fsdp2")
    assert (rollout.mode, rollout.temperature, rollout.calculate_log_probs) == ("async", 1.0, True)
    assert (rollout.val_kwargs.temperature, rollout.val_kwargs.do_sample) == (0.4, True)
    limits = settings.model.max_prompt_tokens, settings.model.max_episode_tokens
    assert (rollout.prompt_length, rollout.response_length, config.data.val_batch_size) == (*limits, None)
    assert config.algorithm.adv_estimator == "grpo"
    assert config.algorithm.enable_rollout_level_advantage is True
    assert config.algorithm.rollout_correction is None
    assert config.agentlightning.trace_aggregator == {
        "level": "trajectory",
        "trajectory_max_prompt_length": limits[0],
        "trajectory_max_response_length": limits[1],
    }


def test_dollars_and_braces_are_no_interpolations_of_omegaconf() -> None:
    """A shell's variables in a command line, a prompt: they reach agent and gateway as they were written."""
    env = {"A": "sh -c 'echo ${Q}'", "B": "awk '{print ${'", "C": "input.x", "D": r"\${HOME} $Q ${run.steps}"}
    prompt = "{outcome}, ${{score}} of {score}"
    layer = {"agent": {"env": env}, "reflection": {"prompt": prompt}}
    settings = load_settings("cpu", layer=layer)
    assert settings.agent.env.items() >= env.items()
    config = pickle.loads(pickle.dumps(composed("cpu", layer=layer)))  # Ray's workers are sent it
    for _ in range(2):
        assert dict(config.agentlightning.local.env_map) == settings.agent.env == dict(config.empo2.agent.env)
        plain: Any = OmegaConf.to_container(config, resolve=True)
        assert json.loads(json.dumps(plain["agentlightning"]["local"]["env_map"])) == settings.agent.env
        assert config.empo2.reflection.prompt == prompt
        assert read_settings(config) == settings
        OmegaConf.resolve(config)  # as the trainer does


def test_kl_and_saving() -> None:
    config = composed("gpu", "algorithm.kl_coefficient=0.01", "run.save_every=0", "run.validate_every=0")
    actor = config.actor_rollout_ref.actor
    assert (actor.use_kl_loss, actor.kl_loss_coef) == (True, 0.01)
    assert config.trainer.save_freq == -1
    assert config.trainer.test_freq == config.trainer.total_training_steps
    assert composed("gpu", "model.val_temperature=0").actor_rollout_ref.rollout.val_kwargs.do_sample is False


def test_a_lora_is_merged_for_vllm() -> None:
    model = composed("gpu", "model.lora_rank=16", "model.lora_alpha=32").actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules, model.lora.merge) == (16, 32, "all-linear", True)
    assert composed("gpu").actor_rollout_ref.model.lora_rank == 0


def test_a_lora_that_vllm_would_not_sample_with() -> None:
    """By verl's own options, in the settings or in a script's configuration."""
    unmerged = r"^actor_rollout_ref.model.lora_rank=8: .* set actor_rollout_ref.model.lora.merge=True$"
    with pytest.raises(ConfigError, match=unmerged):
        composed("cpu", "verl.actor_rollout_ref.model.lora_rank=8")
    config = composed("cpu", "model.lora_rank=8")
    assert read_settings(config).model.lora_rank == 8
    config.actor_rollout_ref.model.lora.merge = False
    with pytest.raises(ConfigError, match=unmerged):
        read_settings(config)


def test_options_of_verl_by_their_own_name() -> None:
    config = composed("cpu", "verl.trainer.balance_batch=false", "verl.actor_rollout_ref.actor.optim.lr=0.5")
    assert config.trainer.balance_batch is False
    assert config.actor_rollout_ref.actor.optim.lr == 0.5  # over the translated one


@pytest.mark.parametrize("key", ["trainer.no_such_option", "no_such_section.x", "actor_rollout_ref.actor.optim.rl"])
def test_unknown_option_of_verl(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^verl\.{key}=1: ") as caught:
        composed("cpu", f"verl.{key}=1")
    assert "\n" not in str(caught.value)
