"""Settings: what config.yaml holds, what is refused and how, and what verl is told."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from empo2.recipe.config import DEFAULTS, load_settings, warnings_of
from empo2.recipe.errors import ConfigError
from empo2.recipe.trainer.verl_config import build_verl_config, read_settings

PROFILES = ("gpu", "gpu-1", "gpu-24", "cpu")
DISTILLATION = "algorithm.off_policy_loss=distillation"


def refused(*overrides: str, profile: str | None = None, **layers: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(profile, overrides, **layers)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_folders_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    settings = load_settings("cpu", ["run.directory=~/runs", "memory.from=~/a.sqlite", "critic.path=~/c.pt"])
    found = settings.run.directory, settings.memory.from_, settings.critic.path
    assert found == ("/home/me/runs", "/home/me/a.sqlite", "/home/me/c.pt")


def test_a_profile_plays_scienceworld_unless_other_tasks_are_given() -> None:
    """Nothing of ScienceWorld is left for others: without it, the profile gpu is what stands in config.yaml."""
    mine = {"agent": {"class": "mine:Agent"}, "tasks": {"source": "mine:load"}}
    assert load_settings("gpu", layer=mine) == load_settings(layer=mine)
    played = load_settings("cpu")
    assert played.agent.class_ == "empo2.agents.scienceworld.agent:ScienceWorldAgent"
    assert (played.algorithm.success_return, played.algorithm.failure_return) == (100, -100)
    assert (played.memory.scope, played.tasks.args["names"]) == (["task", "variation"], ["find-animal"])
    assert load_settings("cpu", ["tasks.source=empo2.agents.scienceworld.tasks:load"]) == played
    # A shared scope must hold the successes of several steps of 128 episodes with 30 entries each.
    assert (played.memory.capacity, load_settings().memory.capacity >= 20 * 128 * 30) == (1000, True)
    for other in (load_settings("cpu", layer=mine), load_settings()):
        assert (other.agent.env, other.tasks.args, other.memory.scope) == ({}, {}, "all-tasks")
        assert (other.algorithm.success_return, other.algorithm.failure_return) == (1, 0)
        assert other.algorithm.novelty_similarity == 0.98


def test_layers_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("algorithm: {seed: 11, tasks_per_step: 3, clip_low: 0.1, rollouts_per_task: 6}")
    layer = {"algorithm": {"seed": 22, "tasks_per_step": 5}}
    settings = load_settings("cpu", ["algorithm.seed=33"], file=file, layer=layer).algorithm
    assert (settings.seed, settings.tasks_per_step, settings.clip_low, settings.rollouts_per_task) == (33, 5, 0.1, 6)
    assert settings.learning_rate == 1e-5  # the profile's
    assert settings.clip_high == 0.3  # config.yaml's


def test_a_form_is_laid_over_the_profile_and_under_what_the_user_says(tmp_path: Path) -> None:
    file, one = tmp_path / "mine.yaml", "algorithm.form=internalise"
    keys = ("form", "baseline", "memory_probability", "off_policy_loss", "kl_coefficient", "kl_rows")
    assert [composed("gpu", *given).actor_rollout_ref.actor.ppo_epochs for given in ([], [one])] == [1, 3]
    others = [load_settings("gpu", given).algorithm for given in ([], [one])]
    assert [each.intrinsic_advantage for each in others] == ["normalized", "plain"]
    assert [each.replayed_tasks for each in others] == [0, 32]

    def of(profile: str, *overrides: str, **layers: Any) -> list[Any]:
        return [getattr(load_settings(profile, overrides, **layers).algorithm, key) for key in keys]

    assert of("gpu") == of("gpu", "algorithm.form=paper") == ["paper", "group", 0.25, "ratio", 0.0, "all"]
    assert of("gpu", one) == of("cpu", one) == ["internalise", "paired", 1.0, "imitation", 1.0, "all-with-tips"]
    assert of("cpu", one, "algorithm.memory_probability=0.5")[2] == 0.5
    file.write_text("algorithm: {form: internalise, kl_coefficient: 0.1, off_policy_loss: reverse-distillation}")
    mine = ["internalise", "paired", 1.0, "reverse-distillation", 0.1, "all-with-tips"]
    assert of("gpu", file=file) == mine
    # The word of the last layer counts; what stands beside an earlier one is the user's own still.
    assert of("gpu", "algorithm.form=paper", file=file)[:5] == ["paper", "group", 0.25, "reverse-distillation", 0.1]
    file.write_text(yaml.safe_dump(load_settings("cpu", [one]).to_dict()))  # as a run keeps it
    assert of("gpu", file=file) == of("cpu", one)


def test_retention_without_a_row_that_it_holds_is_refused() -> None:
    def load(rows: str, other: str) -> None:
        load_settings("gpu", ["algorithm.form=internalise", f"algorithm.kl_rows={rows}", f"algorithm.{other}"])

    load("all-with-tips", "off_policy_probability=1.0")  # off-policy rollouts that are not distilled are held
    for rows, other in (
        ("with-tips", "off_policy_probability=1.0"),
        ("with-tips", "memory_probability=0.0"),
        ("all-with-tips", "memory_probability=0.0"),
    ):
        with pytest.raises(ConfigError, match=rf"algorithm.kl_rows='{rows}': no on-policy row has tips; take "):
            load(rows, other)


def test_a_pair_whose_tips_cannot_be_unlearned_is_warned_of() -> None:
    def warned(*overrides: str) -> bool:
        return any("never unlearned" in each for each in warnings_of(load_settings("gpu", overrides)))

    form, paired, tip_free = (
        "algorithm.form=internalise",
        "algorithm.baseline=paired",
        "algorithm.off_policy_old_log_probs=tip-free",
    )
    assert warned(paired) and warned(form, "algorithm.off_policy_loss=ratio", "algorithm.replay_per_task=0")
    assert not warned() and not warned(paired, tip_free) and not warned(form)
    assert not warned(paired, "algorithm.off_policy_probability=0") and not warned(paired, "algorithm.name=grpo")


def test_numbers_and_texts_are_read_as_they_were_meant() -> None:
    """To YAML 1e-6 is a text."""
    for text in ("1e-6", "+1E-6", "0.000001"):
        assert load_settings(None, [f"algorithm.learning_rate={text}"]).algorithm.learning_rate == 1e-6
    for text in ("${Q}", "cost: ${ 5 or", "a e-6", "e5", "nan", "???"):
        assert load_settings(None, [f"agent.env.X={text!r}"]).agent.env["X"] == text


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("algorithm.learning_rte=1", ["algorithm.learning_rte=1", "did you mean algorithm.learning_rate?"]),
        ("learning_rate=1", ["did you mean algorithm.learning_rate?"]),
        ("algoritm.seed=1", ["did you mean algorithm?"]),
        ("zzz.qqq=1", ["config.yaml"]),
        ("algorithm.learning_rate=inf", ["algorithm.learning_rate='inf'"]),
        ("algorithm.mode_per=rollout", ["algorithm.mode_per='rollout'", "'step' or 'group'"]),
        ("agent.class=no-colon", ["agent.class='no-colon'", "pattern"]),
        ("memory.scope=task", ["memory.scope='task': must be all-tasks, or a list", "[task, variation]"]),
        ("memory.state=regex:(", ["memory.state='regex:('", "not a regular expression"]),
        ("tasks.source=x", ["tasks.source='x'", "hub:NAME"]),
        ("algorithm=1", ["algorithm=1", "is a section", "algorithm.name"]),
        ("algorithm.seed", ["'algorithm.seed'", "key=value"]),
        ("=1", ["'=1'", "key=value"]),
        ("run.keep_rollouts=0", ["run.keep_rollouts=0: must be all, or a number of steps"]),
        ("hardware.network=10.0.0.0/40", ["hardware.network='10.0.0.0/40'", "such as 10.0.0.0/16"]),
        ("hardware.ray_address=ray://head:10001", ["hardware.ray_address='ray://head:10001'"]),
        ("model.server=http://gpu:PORT/v1", ["model.server='http://gpu:PORT/v1': must be an address such as http://"]),
        ("gateway.other_server=gpu:8000", ["gateway.other_server='gpu:8000': must be an address such as http://"]),
        ("run.name=[", ["run.name=[", "not YAML"]),
    ],
)
def test_wrong_values_name_key_and_value(argument: str, parts: list[str]) -> None:
    message = refused(argument)
    assert all(part in message for part in parts)


def test_errors_of_files_and_profiles(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert "No such file" in refused(file=file)
    for content, reason in (
        ("a: [", "not YAML"),
        ("", "must be a mapping"),
        ("algorithm: {sed: 1}", "algorithm.sed=1: there is no such setting; did you mean algorithm.seed?"),
    ):
        file.write_text(content)
        assert reason in refused(file=file)
    assert "profile 'tpu' is unknown; there are gpu, gpu-1, gpu-24, cpu" in refused(profile="tpu")
    assert "tasks.source=['x']: input should be a valid string" in refused("tasks.source=[x]", profile="cpu")


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
    assert load_settings(None, ["agent.class=my.agents.Player"]).agent.name == "my.agents:Player"
    with pytest.raises(ConfigError, match=r"agent\.class=None: give the agent, module:Class"):
        _ = load_settings().agent.name
    assert not load_settings(None, [DISTILLATION, "algorithm.name=grpo"]).algorithm.distills  # GRPO has no tips


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("model.max_context_tokens=5000", "model.max_context_tokens=5000"),
        ("hardware.nodes=2", "hardware.nodes=2: give their Ray cluster as hardware.ray_address=auto"),
        ("hardware.tensor_parallel=3", "hardware.tensor_parallel=3"),
        (f"{DISTILLATION} algorithm.off_policy_old_log_probs=tip-free", "='tip-free'; set that to with-tips"),
        (
            "algorithm.replay_per_task=4",
            "algorithm.replay_per_task=4: a ratio cannot train what older weights sampled; take 0, or off_policy_l",
        ),
        ("algorithm.form=internalise algorithm.name=grpo", "algorithm.form='internalise': is a form of EMPO²"),
        ("algorithm.form=inward", "algorithm.form='inward': "),
        ("algorithm.updates_per_step=17", "algorithm.updates_per_step=17"),
        ("algorithm.success_return=0", "algorithm.success_return=0: must exceed failure_return=0"),
        ("algorithm.tasks_per_step=3 algorithm.updates_per_step=1 algorithm.rollouts_per_task=3", "tasks_per_step=3"),
    ],
)
def test_values_that_do_not_go_together(overrides: str, key: str) -> None:
    assert key in refused(*overrides.split())


def composed(profile: str, *overrides: str, **layers: Any) -> Any:
    given: Any = {"model_path": "/models/m", "run_directory": Path("/runs/demo")}
    settings = load_settings(profile, overrides, **layers)
    return build_verl_config(settings, gateway_url="http://127.0.0.1:1", gateway_key="secret", **given)


ACTOR, REFERENCE = "verl.actor_rollout_ref.actor", "verl.actor_rollout_ref.ref"
ASYNC = "verl.agentlightning.async_rollout.enabled=true"
SIZE = "verl.agentlightning.async_rollout.async_train_batch_size"


@pytest.mark.parametrize(
    ("profile", "overrides", "words"),
    [
        ("gpu", [ASYNC], "async_train_batch_size=None"),
        ("gpu", [ASYNC, f"{SIZE}=16"], "async_train_batch_size=16"),
        ("gpu", [ASYNC, f"{SIZE}=17"], "algorithm.mode_per='step'"),
        ("cpu", ["verl.actor_rollout_ref.model.lora_rank=8"], r"lora_rank=8: .* set .*lora.merge=True$"),
        ("gpu", [f"{ACTOR}.ulysses_sequence_parallel_size=2"], "size=2: rows would get into wrong updates"),
        ("gpu", [f"{REFERENCE}.fsdp_config.ulysses_sequence_parallel_size=2"], "ref.fsdp_config.*=2: rows"),
        ("gpu", [f"{ACTOR}.strategy=fsdp"], "actor.strategy='fsdp': must be fsdp2$"),
        ("gpu", [f"{REFERENCE}.strategy=megatron"], "ref.strategy='megatron': must be fsdp2"),
        ("gpu", [f"{ACTOR}.use_dynamic_bsz=True"], "use_dynamic_bsz=True: sdpa gets a dense mask"),
        ("gpu", ["verl.algorithm.rollout_correction.rollout_is=token"], "vLLM's are the old ones.*take it out"),
        ("gpu", [DISTILLATION, "verl.actor_rollout_ref.model.use_fused_kernels=true"], "use_fused_kernels=True"),
        ("gpu", ["verl.algorithm.use_kl_in_reward=true"], r"use_kl_in_reward=True: must be False: .*kl_coefficient"),
        ("gpu", ["verl.critic.enable=true"], r"critic.enable=True: must be False"),
        ("gpu", [f"{ACTOR}.ppo_epochs=3"], "ppo_epochs=3: must be 1: as algorithm.update_epochs"),
        ("gpu", ["verl.agentlightning.max_ppo_update_times=3"], r"max_ppo_update_times=3: .*updates_per_step"),
        ("gpu", ["verl.agentlightning.trace_aggregator.level=transition"], r"level='transition': must be 'trajectory'"),
        ("cpu", ["verl.no_such_section.x=1"], r"^verl\.no_such_section\.x=1: "),
        ("cpu", [f"{ACTOR}.optim.rl=1"], r"^verl\.actor_rollout_ref\.actor\.optim\.rl=1: "),
        ("cpu", ["run.loggers=[tensorboard, swanlab]"], "the package swanlab is not installed; add it by pip"),
    ],
)
def test_what_verl_cannot_do_is_refused_before_the_start(profile: str, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        composed(profile, *overrides)
    assert "\n" not in str(caught.value)


DISTILLED = f"algorithm.mode_per=group {DISTILLATION} algorithm.baseline=paired"
PAIRED = "algorithm.mode_per=group algorithm.baseline=paired algorithm.off_policy_old_log_probs=tip-free"
TURNS = "algorithm.mode_per=group algorithm.advantage=gigpo"


@pytest.mark.parametrize("chosen", ["algorithm.mode_per=group", "algorithm.name=grpo", DISTILLED, PAIRED, TURNS])
def test_asynchronous_rollouts_that_are_accepted(chosen: str) -> None:
    assert composed("gpu", ASYNC, f"{SIZE}=32", *chosen.split()).agentlightning.async_rollout.enabled


@pytest.mark.parametrize("profile", PROFILES)
def test_translation(profile: str) -> None:
    """What the settings do not say is verl's default, as long as that is what the objective needs."""
    assert set(yaml.safe_load(DEFAULTS.read_text())["profiles"]) == set(PROFILES)
    settings, config = load_settings(profile), composed(profile)
    assert read_settings(config) == settings
    # A run can be made again from what verl was given.
    given: Any = OmegaConf.to_container(config.empo2)
    assert given.pop("run_directory") == "/runs/demo"
    assert load_settings(layer=given) == settings
    # ScienceWorld's rewards, to the last bit: 1/n beside -100..100, as -1..1; half of a new state is no difference.
    algorithm = settings.algorithm
    assert (algorithm.scale, algorithm.new_state_reward, algorithm.tolerance) == (0.01, 1.0, 0.5)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert actor.optim.lr == settings.algorithm.learning_rate
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.3, 10.0)
    assert (actor.ppo_epochs, actor.shuffle, actor.policy_loss.loss_mode) == (1, False, "per_rollout_mean")
    assert (actor.use_kl_loss, actor.entropy_coeff) == (False, 0)
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
    own = composed("cpu", "algorithm.kl_coefficient=0.01").actor_rollout_ref
    assert [own[part].fsdp_config.param_offload for part in ("actor", "ref")] == [False, False]
    assert (model.lora_rank, model.lora_alpha, model.target_modules, model.lora.merge) == (16, 32, "all-linear", True)
    assert read_settings(config).model.lora_rank == 16
    assert config.trainer.balance_batch is False
    assert actor.optim.lr == 0.5  # over the translated one
    model.lora.merge = False  # as a script may have it: vLLM would not sample with the LoRA
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref.model.lora_rank=16: .*lora.merge=True$"):
        read_settings(config)


def test_what_a_script_gives_is_checked_against_its_own_sizes() -> None:
    config = composed("gpu")
    config.empo2 = OmegaConf.create({"algorithm": {"updates_per_step": 32, "update_epochs": 1}})
    config.data.train_batch_size = 32  # config.yaml has 16 tasks a step
    algorithm = read_settings(config).algorithm
    assert (algorithm.tasks_per_step, algorithm.updates_per_step, algorithm.learning_rate) == (32, 32, 1e-6)


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


@pytest.mark.parametrize("profile", ["gpu", "gpu-1", "gpu-24"])
def test_verl_accepts_a_profile(profile: str) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = composed(profile)
    validate_config(config, need_reference_policy(config), need_critic(config))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    # One row a pass: rows of different lengths would get a dense mask, with which sdpa has no flash kernel.
    assert (actor.strategy, actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz) == ("fsdp2", 1, False)
    assert actor.fsdp_config.forward_prefetch == (profile == "gpu")
    assert (rollout.enforce_eager, rollout.enable_prefix_caching, rollout.free_cache_engine) == (False, True, True)


def test_what_would_train_something_else_is_refused_in_a_script_too() -> None:
    config = composed("gpu")
    config.actor_rollout_ref.actor.strategy = "fsdp"  # as in a script that does not choose
    assert read_settings(config).hardware.gpus_per_node == 8
    config.empo2.algorithm.off_policy_loss = "distillation"
    with pytest.raises(ConfigError, match=r"strategy='fsdp': does not give the log-probs .* set it to fsdp2"):
        read_settings(config)
    config.actor_rollout_ref.actor.ulysses_sequence_parallel_size = 4
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size=4"):
        read_settings(config)
