"""Settings: what config.yaml holds, what is refused and how, and what verl is told."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from empo2.recipe.config import DEFAULTS, load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.trainer.verl_config import build_verl_config, read_settings

PROFILES = ("gpu", "gpu-1", "gpu-24", "cpu")


def refused(*overrides: str, profile: str | None = None, **layers: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(profile, overrides, **layers)
    message = str(caught.value)
    assert "\n" not in message
    return message


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
    assert set(yaml.safe_load(DEFAULTS.read_text())["profiles"]) == set(PROFILES)
    for profile in PROFILES:
        algorithm = load_settings(profile).algorithm
        assert (algorithm.scale, algorithm.new_state_reward, algorithm.tolerance) == (0.01, 1.0, 0.5)


def test_layers_in_their_order(tmp_path: Path) -> None:
    """Profile, then file, then mapping, then arguments."""
    file = tmp_path / "mine.yaml"
    file.write_text("algorithm: {seed: 11, tasks_per_step: 3, clip_low: 0.1, rollouts_per_task: 6}")
    layer = {"algorithm": {"seed": 22, "tasks_per_step": 5}}
    settings = load_settings("cpu", ["algorithm.seed=33"], file=file, layer=layer).algorithm
    assert (settings.seed, settings.tasks_per_step, settings.clip_low, settings.rollouts_per_task) == (33, 5, 0.1, 6)
    assert settings.learning_rate == 1e-5  # the profile's
    assert settings.clip_high == 0.3  # config.yaml's


@pytest.mark.parametrize("text", ["1e-6", "+1E-6", "0.000001"])
def test_yaml_reads_1e_6_as_text_and_we_do_not(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"algorithm: {{learning_rate: {text}}}")
    assert load_settings(file=file).algorithm.learning_rate == 1e-6
    assert load_settings(None, [f"algorithm.learning_rate={text}"]).algorithm.learning_rate == 1e-6


@pytest.mark.parametrize("text", ["${Q}", "cost: ${ 5 or", "a e-6", "e5", "nan", "???"])
def test_texts_stay_as_they_are(text: str) -> None:
    assert load_settings(layer={"agent": {"env": {"X": text}}}).agent.env["X"] == text
    assert load_settings(None, [f"agent.env.X={text!r}"]).agent.env["X"] == text


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("algorithm.learning_rte=1", ["algorithm.learning_rte=1", "did you mean algorithm.learning_rate?"]),
        ("learning_rate=1", ["did you mean algorithm.learning_rate?"]),
        ("memory.mask_threshold=0.1", ["did you mean algorithm.mask_threshold?"]),
        ("algoritm.seed=1", ["did you mean algorithm?"]),
        ("zzz.qqq=1", ["config.yaml"]),
        ("algorithm.learning_rate=inf", ["algorithm.learning_rate='inf'"]),
        ("algorithm.seed=1.5", ["algorithm.seed=1.5", "integer"]),
        ("algorithm.intrinsic_coefficient=1.0", ["algorithm.intrinsic_coefficient=1.0", "less than or equal to 0.5"]),
        ("algorithm.mode_per=rollout", ["algorithm.mode_per='rollout'", "'step' or 'group'"]),
        ("agent.class=no-colon", ["agent.class='no-colon'", "pattern"]),
        ("memory.scope=task", ["memory.scope='task': must be all-tasks, or a list", "[task, variation]"]),
        ("memory.scope=[1]", ["memory.scope=[1]: must be all-tasks, or a list"]),
        ("memory.state=regex:(", ["memory.state='regex:('", "not a regular expression"]),
        ("tasks.source=x", ["tasks.source='x'", "hub:NAME"]),
        ("algorithm=1", ["algorithm=1", "is a section", "algorithm.name"]),
        ("agent=", ["agent=None", "is a section", "agent.class"]),
        ("algorithm.seed", ["'algorithm.seed'", "key=value"]),
        ("=1", ["'=1'", "key=value"]),
        ("run.keep_rollouts=0", ["run.keep_rollouts=0: must be all, or a number of steps"]),
        ("run.name=[", ["run.name=[", "not YAML"]),
    ],
)
def test_wrong_values_name_key_and_value(argument: str, parts: list[str]) -> None:
    message = refused(argument)
    assert all(part in message for part in parts)


def test_unknown_profile() -> None:
    message = refused(profile="tpu")
    assert all(profile in message for profile in ("'tpu'", *PROFILES))


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
    assert reason in refused(file=file)


def test_another_agent_and_another_task_source_do_not_inherit() -> None:
    """But another agent for the same tasks, such as a framework of docs/agents.md, gets their variables."""
    played = load_settings("cpu")
    other = load_settings("cpu", layer={"agent": {"class": "mine:Agent", "env": {"LEVEL": "input.level"}}})
    assert (other.agent.env, other.tasks) == ({"LEVEL": "input.level"}, played.tasks)
    framework = load_settings("cpu", ["agent.class=empo2.agents.frameworks.langgraph:LangGraphAgent"])
    assert framework.agent.env == played.agent.env != {}
    assert load_settings("cpu", ["tasks.source=mine:load", "tasks.args.level=3"]).tasks.args == {"level": 3}
    one_more = load_settings("cpu", ["agent.env.MY_VARIABLE=input.task", "tasks.args.level=3"])
    assert one_more.agent.env == {**played.agent.env, "MY_VARIABLE": "input.task"}
    assert one_more.tasks.args == {**played.tasks.args, "level": 3}


def test_a_class_may_be_written_with_dots() -> None:
    assert load_settings(None, ["agent.class=my.agents.Player"]).agent.name == "my.agents:Player"
    with pytest.raises(ConfigError, match=r"agent\.class=None: give the agent, module:Class"):
        _ = load_settings().agent.name


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("model.max_context_tokens=5000", "model.max_context_tokens=5000"),
        ("hardware.tensor_parallel=3", "hardware.tensor_parallel=3"),
        ("algorithm.updates_per_step=17", "algorithm.updates_per_step=17"),
        ("algorithm.success_return=0", "algorithm.success_return=0: must exceed failure_return=0"),
        ("algorithm.tasks_per_step=3 algorithm.updates_per_step=1 algorithm.rollouts_per_task=3", "tasks_per_step=3"),
    ],
)
def test_values_that_do_not_go_together(overrides: str, key: str) -> None:
    assert key in refused(*overrides.split())


# verl's configuration


def composed(profile: str, *overrides: str, **layers: Any) -> Any:
    given: Any = {"model_path": "/models/m", "run_directory": Path("/runs/demo")}
    settings = load_settings(profile, overrides, **layers)
    return build_verl_config(settings, gateway_url="http://127.0.0.1:1", gateway_key="secret", **given)


ASYNC = "verl.agentlightning.async_rollout.enabled=true"
SIZE = "verl.agentlightning.async_rollout.async_train_batch_size"
LORA = r"actor_rollout_ref.model.lora_rank=8: .* set actor_rollout_ref.model.lora.merge=True$"


@pytest.mark.parametrize(
    ("profile", "overrides", "words"),
    [
        ("gpu", [ASYNC], "async_train_batch_size=None"),
        ("gpu", [ASYNC, f"{SIZE}=16"], "async_train_batch_size=16"),
        ("gpu", [ASYNC, f"{SIZE}=17"], "algorithm.mode_per='step'"),
        ("cpu", ["verl.actor_rollout_ref.model.lora_rank=8"], f"^{LORA}"),  # vLLM would not sample with it
        ("cpu", ["verl.no_such_section.x=1"], r"^verl\.no_such_section\.x=1: "),
        ("cpu", ["verl.actor_rollout_ref.actor.optim.rl=1"], r"^verl\.actor_rollout_ref\.actor\.optim\.rl=1: "),
        ("cpu", ["run.loggers=[tensorboard, swanlab]"], "the package swanlab is not installed; add it by pip"),
    ],
)
def test_what_verl_cannot_do_is_refused_before_the_start(profile: str, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        composed(profile, *overrides)
    assert "\n" not in str(caught.value)


DISTILLED = "algorithm.mode_per=group algorithm.off_policy_loss=distillation algorithm.baseline=paired"
PAIRED = "algorithm.mode_per=group algorithm.baseline=paired algorithm.off_policy_old_log_probs=tip-free"
TURNS = "algorithm.mode_per=group algorithm.advantage=gigpo"


@pytest.mark.parametrize("chosen", ["algorithm.mode_per=group", "algorithm.name=grpo", DISTILLED, PAIRED, TURNS])
def test_asynchronous_rollouts_that_are_accepted(chosen: str) -> None:
    assert composed("gpu", ASYNC, f"{SIZE}=32", *chosen.split()).agentlightning.async_rollout.enabled


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
    rows = {"trajectory_max_prompt_length": limits[0], "trajectory_max_response_length": limits[1]}
    assert config.agentlightning.trace_aggregator == {"level": "trajectory", **rows}


def test_what_differs_from_the_profiles() -> None:
    changed = "algorithm.kl_coefficient=0.01 run.save_every=0 run.validate_every=0 model.val_temperature=0"
    changed += " model.lora_rank=16 model.lora_alpha=32 verl.trainer.balance_batch=false"
    config = composed("gpu", *changed.split(), "verl.actor_rollout_ref.actor.optim.lr=0.5")
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    assert (actor.use_kl_loss, actor.kl_loss_coef) == (True, 0.01)
    assert (config.trainer.save_freq, config.trainer.test_freq) == (-1, config.trainer.total_training_steps)
    assert config.actor_rollout_ref.rollout.val_kwargs.do_sample is False
    assert (model.lora_rank, model.lora_alpha, model.target_modules, model.lora.merge) == (16, 32, "all-linear", True)
    assert config.trainer.balance_batch is False
    assert actor.optim.lr == 0.5  # over the translated one


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


def test_a_lora_of_a_script_that_vllm_would_not_sample_with() -> None:
    config = composed("cpu", "model.lora_rank=8")
    assert read_settings(config).model.lora_rank == 8
    config.actor_rollout_ref.model.lora.merge = False
    with pytest.raises(ConfigError, match=f"^{LORA}"):
        read_settings(config)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.name=grpo", "algorithm.name='grpo' shows no tips"),
        ("algorithm.off_policy_old_log_probs=tip-free", "set that to with-tips"),
        ("verl.actor_rollout_ref.model.use_fused_kernels=true", "use_fused_kernels=True"),
    ],
)
def test_distillation_refuses_what_it_cannot_work_with(override: str, words: str) -> None:
    for loss in ("distillation", "reverse-distillation"):
        with pytest.raises(ConfigError, match=words) as caught:
            composed("gpu", f"algorithm.off_policy_loss={loss}", override)
        assert f"algorithm.off_policy_loss={loss!r}" in str(caught.value) and "\n" not in str(caught.value)
    composed("gpu", override)


def test_nothing_is_offloaded_without_a_gpu() -> None:
    """FSDP2 would pin the memory, which asks for one: the reference's too, that a KL term needs."""
    config = composed("cpu", "algorithm.kl_coefficient=0.01").actor_rollout_ref
    offloaded = [config[part].fsdp_config.param_offload for part in ("actor", "ref")]
    assert config.actor.use_kl_loss and offloaded == [False, False]
