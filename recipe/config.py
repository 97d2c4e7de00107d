"""Read and check settings: config.yaml, then a profile, a user's file and ``key=value`` arguments laid over it."""

import difflib
import importlib
import ipaddress
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from empo2.recipe import baselines
from empo2.recipe.errors import ConfigError
from empo2.recipe.redaction import MASK, redacted

DEFAULTS = Path(__file__).with_name("config.yaml")
SCIENCEWORLD = Path(__file__).parents[1] / "agents/scienceworld/config.yaml"
ALL_TASKS = "all-tasks"
TASK_FILES = (".jsonl", ".json", ".csv", ".parquet")
TRACES_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
VLLM_TRACES = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "vllm"}  # it would take gRPC
_TRACES = "/v1/traces"

# Where and how fast episodes are played decides no result.
NO_RESULT = frozenset({"agent.concurrency", "memory.embedder_threads", "memory.embedder_device"})

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
_Path = Annotated[str, AfterValidator(os.path.expanduser)]  # `~` stays in `run.directory=~/runs`, as bash has it


def _checked_scope(value: Any) -> Any:
    if value != ALL_TASKS and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise ValueError(f"must be {ALL_TASKS}, or a list of the tasks' fields, such as [task, variation]")
    return value


def _checked_state(value: str) -> str:
    if value.startswith("regex:"):
        try:
            re.compile(value.removeprefix("regex:"))
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
    elif value not in ("beginning", "end") and not re.fullmatch(r"[\w.]+:\w+", value):
        raise ValueError("must be beginning, end, regex:PATTERN, or module:function")
    return value


def _checked_keep(value: Any) -> Any:
    if value != "all" and not (type(value) is int and value > 0):
        raise ValueError("must be all, or a number of steps")
    return value


def is_task_path(source: str) -> bool:
    """Return whether ``tasks.source`` names a file, or a folder of tasks, which has a / in its name."""
    return source.endswith(TASK_FILES) or ("/" in source and ":" not in source)


def _checked_source(value: str) -> str:
    if not re.fullmatch(r"hub:[\w.-]+(/[\w.-]+)?|[\w.]+:\w+", value) and not is_task_path(value):
        kinds = "a .jsonl, .json, .csv or .parquet file, a folder with a / in it, or hub:NAME"
        raise ValueError(f"must be module:function, {kinds}")
    return value


def _dotted_as_colon(value: Any) -> Any:
    """Return ``module:Class`` for ``module.Class``."""
    return re.sub(r"\.(\w+)$", r":\1", value) if isinstance(value, str) and ":" not in value else value


def _checked_network(value: str) -> str:
    if "/" in value or value[:1].isdigit():
        try:
            ipaddress.IPv4Network(value, strict=False)
        except ValueError as error:
            raise ValueError(f"{error}; must be addresses such as 10.0.0.0/16, or an interface such as eth0") from None
    return value


def _checked_url(value: str) -> str:
    try:
        url = urlsplit(value)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # such as a port that is no number
        usable = False
    if not usable:
        raise ValueError("must be an address such as http://10.0.0.5:8000")
    return value


_Url = Annotated[str, AfterValidator(_checked_url)]
Scope = Annotated[Literal["all-tasks"] | list[str], PlainValidator(_checked_scope)]
ClassName = Annotated[str, BeforeValidator(_dotted_as_colon), Field(pattern=r"^[\w.]+:\w+$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True, allow_inf_nan=False)


class Run(_Section):
    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] | None
    directory: _Path
    steps: Positive
    validate_every: NotNegative
    validate_first: bool
    validate_with_memory: bool
    validate_training_tasks: bool
    validate_samples: Positive
    save_every: NotNegative
    keep_checkpoints: Positive
    keep_rollouts: Annotated[int | Literal["all"], PlainValidator(_checked_keep)]
    resume: Literal["never", "auto"]
    loggers: list[Literal["tensorboard", "wandb", "console", "mlflow", "swanlab", "clearml", "trackio"]]


class Algorithm(_Section):
    name: Literal["empo2", "grpo"]
    form: Literal["paper", "internalise"]
    seed: NotNegative
    memory_probability: Probability
    off_policy_probability: Probability
    mode_per: Literal["step", "group"]
    baseline: Literal["group", "paired"]
    advantage: Literal["grpo", "gigpo", "rlvmr"]
    gigpo_discount: Probability
    normalize_by_std: bool
    mask_threshold: Probability
    log_prob_gap_limit: Annotated[float, Field(gt=0)] | None
    off_policy_old_log_probs: Literal["with-tips", "tip-free"]
    off_policy_loss: Literal["ratio", "distillation", "reverse-distillation", "imitation"]
    distillation_coefficient: Annotated[float, Field(gt=0)]
    replay_per_task: NotNegative
    success_return: float
    failure_return: float
    return_scale: Annotated[float, Field(gt=0)] | None
    intrinsic_coefficient: Annotated[float, Field(ge=0, le=0.5)]  # above: meant in the units of the return
    novelty: Literal["visits", "rnd"]
    intrinsic_advantage: Literal["normalized", "plain"]
    novelty_similarity: Annotated[float, Field(ge=-1, lt=1)]
    failed_rollout_return: float | None
    return_tolerance: Annotated[float, Field(ge=0, le=0.05)]
    tasks_per_step: Positive
    rollouts_per_task: Annotated[int, Field(ge=2)]
    updates_per_step: Positive
    update_epochs: Positive
    learning_rate: Annotated[float, Field(ge=0)]
    clip_low: Annotated[float, Field(ge=0, le=1)]
    clip_high: Annotated[float, Field(ge=0)]
    kl_coefficient: Annotated[float, Field(ge=0)]
    kl_rows: Literal["all", "with-tips", "all-with-tips"]

    @property
    def distills(self) -> bool:
        return self.name == "empo2" and self.off_policy_loss != "ratio"

    @property
    def holds_untaught(self) -> bool:
        """Return whether off-policy rollouts that are not distilled have the KL to the first weights, with tips."""
        return self.distills and self.kl_rows == "all-with-tips" and self.kl_coefficient > 0

    @property
    def replayed_tasks(self) -> int:
        return self.replay_per_task * self.tasks_per_step if self.distills else 0

    @property
    def return_range(self) -> float:
        return self.success_return - self.failure_return

    @property
    def scale(self) -> float:
        """Factor of returns in scores: ``return_scale``, or 1 / the range."""
        return 1 / self.return_range if self.return_scale is None else self.return_scale

    @property
    def new_state_reward(self) -> float:
        """Intrinsic reward of a novelty of 1, that of a state never visited before, in the units of the return."""
        return self.intrinsic_coefficient * self.return_range

    @property
    def tolerance(self) -> float:
        """``return_tolerance`` in the units of the return."""
        return self.return_tolerance * self.return_range


class Model(_Section):
    path: str
    server: _Url | None
    tool_parser: str
    chat_template_kwargs: dict[str, Any]
    lora_rank: NotNegative
    lora_alpha: Positive
    temperature: Annotated[float, Field(gt=0)]
    val_temperature: Annotated[float, Field(ge=0)]
    max_prompt_tokens: Positive
    max_episode_tokens: Positive
    max_context_tokens: Positive


class Agent(_Section):
    class_: Annotated[ClassName | None, Field(alias="class")]
    env: dict[str, str]
    time_limit: Positive
    most_calls: Positive
    concurrency: NotNegative

    @property
    def name(self) -> str:
        """The class; a ConfigError if none is given."""
        if self.class_ is None:
            raise ConfigError("agent.class=None: give the agent, module:Class, or --profile for ScienceWorld's")
        return self.class_


class Tasks(_Section):
    source: Annotated[str, AfterValidator(_checked_source)] | None
    args: dict[str, Any]
    starts: Literal["first", "by-count", "by-policy"]


class Memory(_Section):
    from_: Annotated[_Path | None, Field(alias="from")]
    scope: Scope
    state: Annotated[str, AfterValidator(_checked_state)]
    state_characters: Positive
    retrieval: Literal["score", "similarity", "value", "newest", "actions", "random"]
    searched: Literal["user-turns", "every-turn", "first-turn"]
    judged: bool
    top_k: Positive
    min_similarity: Annotated[float, Field(ge=-1, lt=1)]
    candidates: Positive
    value_weight: Probability
    similarity_statistics: Annotated[list[float], Field(min_length=2, max_length=2)] | None
    value_learning_rate: Annotated[float, Field(gt=0, le=1)]
    exploration: Probability
    episode_tokens: Positive
    capacity: Positive
    embedder: str
    embedder_device: str
    embedder_threads: Positive | None
    deadline: Positive

    @property
    def accelerated(self) -> bool:
        """Whether the embedder runs on an accelerator."""
        return not self.embedder_device.startswith("cpu")


class Reflection(_Section):
    prompt: str
    of: Literal["all", "failures"]
    form: Literal["sentence", "transcript", "procedure", "actions"]
    max_words: Annotated[int, Field(gt=0, le=1000)]
    max_tokens: Positive
    temperature: Annotated[float, Field(ge=0)]
    timeout: Annotated[float, Field(gt=0)]


class CriticSettings(_Section):
    path: _Path | None
    samples: Annotated[int, Field(ge=2)]
    decay: Probability
    least_weight: Probability


class CallRule(_Section):
    """A rule of ``gateway.trained_calls``: a call fits if all patterns that are given do (those of a shell)."""

    path: str | None = None
    header: str | None = None
    model: str | None = None


class Gateway(_Section):
    host: str | None
    port: Annotated[int, Field(ge=0, le=65535)]
    trained_calls: list[CallRule] | Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    compaction: Literal["trained", "untrained"]
    other_server: _Url | None
    cumulative_tokens: bool
    max_request: Annotated[float, Field(gt=0)]
    max_rollout: Annotated[float, Field(gt=0)]
    max_choices: Positive
    max_parameters: Positive
    traces: _Url | None


class Hardware(_Section):
    device: Literal["gpu", "cpu"]
    ray_address: Annotated[str, Field(pattern=r"^(auto|[\w.-]+:\d+)$")] | None
    network: Annotated[str, AfterValidator(_checked_network)] | None
    nodes: Positive
    gpus_per_node: Positive
    tensor_parallel: Positive
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)]
    offload: bool
    micro_batch: Positive
    max_sequences: Positive
    kv_cache: Positive

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def cluster(self) -> str | None:
        """Address of the Ray cluster that the trainer joins; None: it starts Ray itself, for itself."""
        return self.ray_address or os.environ.get("RAY_ADDRESS") or None


class Settings(_Section):
    """Hold all settings of a run, checked; config.yaml explains each."""

    run: Run
    algorithm: Algorithm
    model: Model
    agent: Agent
    tasks: Tasks
    memory: Memory
    reflection: Reflection
    critic: CriticSettings
    gateway: Gateway
    hardware: Hardware
    verl: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return a plain nested dict with config.yaml's keys."""
        return self.model_dump(by_alias=True)


def load_settings(
    profile: str | None = None,
    overrides: Iterable[str] = (),
    *,
    world: Mapping[str, Any] | None = None,
    file: Path | None = None,
    layer: Mapping[str, Any] | None = None,
) -> Settings:
    """Lay profile, form, a world's settings, user's YAML file, a nested mapping and ``key=value`` over config.yaml.

    A profile plays ScienceWorld unless another layer gives ``tasks.source``. The form is that of the last layer which
    gives ``algorithm.form``.

    Raises:
        ConfigError: an unknown key (with the nearest right one), a wrong type or value, an unreadable file.
    """
    values = parse_yaml(DEFAULTS.read_text())
    profiles, forms = values.pop("profiles"), values.pop("forms")
    if profile is not None and profile not in profiles:
        raise ConfigError(f"profile {profile!r} is unknown; there are {', '.join(profiles)}")
    of_file = with_task_files(read_layer(file), file.parent) if file is not None else {}
    layers = [world or {}, of_file, layer or {}, *map(_parse_override, overrides)]
    form = forms.get(str(dict(flat(reduce(lay_over, layers))).get("algorithm.form")), {})
    layers = [form, *layers]
    if profile is not None:
        layers = [profiles[profile], *_scienceworld(profile, layers), *layers]
    for each in layers:
        for section, names in each.items():
            if section in values and not isinstance(names, Mapping):
                example = next(iter(values[section]), "NAME")
                raise ConfigError(f"{section}={names!r}: is a section; set its keys, such as {section}.{example}")
        _discard(values, each)
        values = lay_over(values, each)
    for name, value in flat(values):
        if MASK in str(value):
            fix = f"the file was written without its secrets; give the value as {name}=VALUE"
            raise ConfigError(f"{name}={MASK!r}: {fix}")
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(problem) for problem in error.errors())) from None
    baselines.check(settings)
    for conflict in _conflicts(settings):
        raise ConfigError(conflict)
    return settings


def _scienceworld(profile: str, layers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return ScienceWorld's settings for a profile; none if a layer gives other tasks."""
    world = parse_yaml(SCIENCEWORLD.read_text())
    of_profile = world.pop("profiles").get(profile, {})
    tasks = [each["tasks"] for each in layers if isinstance(each.get("tasks"), Mapping)]
    others = any(section.get("source", world["tasks"]["source"]) != world["tasks"]["source"] for section in tasks)
    return [] if others else [world, of_profile]


def _discard(values: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Discard an agent's variables and a task source's arguments if the layer gives other ones."""
    agent, tasks = layer.get("agent", {}), layer.get("tasks", {})
    if "env" in agent and agent.get("class", values["agent"]["class"]) != values["agent"]["class"]:
        values["agent"]["env"] = {}
    if tasks.get("source", values["tasks"]["source"]) != values["tasks"]["source"]:
        values["tasks"]["args"] = {}


class _Loader(yaml.CSafeLoader):
    """A YAML 1.1 loader that also reads 1e-6 as a number."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789")


def parse_yaml(text: str) -> Any:
    """Return what YAML text holds."""
    return yaml.load(text, _Loader)


def read_layer(file: Path, option: str = "--config") -> Mapping[str, Any]:
    """Return the settings of a YAML file that an option named; a ConfigError if it is none."""
    try:
        content = parse_yaml(file.read_text())
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(f"{option} {file}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{option} {file}: must be a mapping of sections, such as 'algorithm: {{seed: 1}}'")
    return content


def with_task_files(layer: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return settings with the files of their tasks, where these are relative, in a folder: that of the settings."""
    tasks = layer.get("tasks")
    if not isinstance(tasks, Mapping) or folder == Path() or not is_task_path(str(tasks.get("source", "x.csv"))):
        return layer

    def placed(value: Any) -> Any:
        named = isinstance(value, str) and is_task_path(value)
        return os.path.join(folder, os.path.expanduser(value)) if named else value

    tasks = {**tasks, **({"source": placed(tasks["source"])} if "source" in tasks else {})}
    if isinstance(args := tasks.get("args"), Mapping) and "validation" in args:
        tasks["args"] = {**args, "validation": placed(args["validation"])}
    return {**layer, "tasks": tasks}


def _parse_override(argument: str) -> dict[str, Any]:
    key, equals, text = argument.partition("=")
    if not equals or not key:
        raise ConfigError(f"{argument!r}: settings are given as key=value, such as algorithm.seed=1")
    try:
        return nested(key, parse_yaml(text))
    except yaml.YAMLError:
        raise ConfigError(f"{argument!r}: not YAML; put quotes around text with special characters") from None


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return a dotted key with its value as nested mappings."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their dotted keys."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def lay_over(base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings merged; the layer's values win."""
    # Not OmegaConf.merge: it would read "${" in a prompt or a command line as an interpolation.
    merged = dict(base)
    for key, value in layer.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = lay_over(base[key], value) if both else value
    return merged


def _explain(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    unknown = problem["type"] == "extra_forbidden"
    said = problem["msg"].removeprefix("Value error, ")
    message = f"there is no such setting{_nearest(key)}" if unknown else said[0].lower() + said[1:]
    value = redacted({str(problem["loc"][-1]): problem["input"]}).popitem()[1]
    return f"{key}={value!r}: {message}"


def _nearest(key: str) -> str:
    sections = parse_yaml(DEFAULTS.read_text())
    del sections["profiles"], sections["forms"]
    known = [*(f"{section}.{name}" for section, names in sections.items() for name in names), *sections]
    same_name = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    close = difflib.get_close_matches(key, known, n=1) or same_name
    return f"; did you mean {close[0]}?" if close else "; see config.yaml for all of them"


def _conflicts(settings: Settings) -> Iterator[str]:
    """Yield errors about values that contradict each other."""
    model, hardware, algorithm, memory = settings.model, settings.hardware, settings.algorithm, settings.memory
    longest = model.max_prompt_tokens + model.max_episode_tokens
    if longest > model.max_context_tokens:
        parts = f"max_prompt_tokens + max_episode_tokens = {longest}"
        yield f"model.max_context_tokens={model.max_context_tokens}: must hold {parts}"
    if hardware.nodes > 1 and hardware.cluster is None:
        yield f"hardware.nodes={hardware.nodes}: give their Ray cluster as hardware.ray_address=auto (docs/cluster.md)"
    gpus, each = hardware.gpus, hardware.gpus_per_node
    if each % hardware.tensor_parallel:
        yield f"hardware.tensor_parallel={hardware.tensor_parallel}: must divide the {each} GPUs of a node"
    if algorithm.distills and algorithm.off_policy_old_log_probs == "tip-free":
        loss = f"algorithm.off_policy_loss={algorithm.off_policy_loss!r}"
        yield f"{loss}: has no ratio that needs algorithm.off_policy_old_log_probs='tip-free'; set that to with-tips"
    if algorithm.name == "grpo" and algorithm.form != "paper":
        yield f"algorithm.form={algorithm.form!r}: is a form of EMPO²; with algorithm.name='grpo' leave it at 'paper'"
    if algorithm.replay_per_task and algorithm.off_policy_loss == "ratio":
        fix = "take 0, or off_policy_loss=distillation or imitation"
        why = "a ratio cannot train what older weights sampled"
        yield f"algorithm.replay_per_task={algorithm.replay_per_task}: {why}; {fix}"
    on_policy = algorithm.off_policy_probability < 1 or algorithm.holds_untaught
    with_tips = algorithm.name == "empo2" and algorithm.memory_probability > 0 and on_policy
    if algorithm.kl_coefficient > 0 and algorithm.kl_rows != "all" and not with_tips:
        fix = "take memory_probability above 0 and off_policy_probability below 1, or kl_rows=all"
        yield f"algorithm.kl_rows={algorithm.kl_rows!r}: no on-policy row has tips; {fix}"
    if algorithm.updates_per_step > algorithm.tasks_per_step:
        groups = f"tasks_per_step={algorithm.tasks_per_step}; each update learns from whole groups"
        yield f"algorithm.updates_per_step={algorithm.updates_per_step}: must not exceed {groups}"
    if algorithm.return_range <= 0:
        worst = f"failure_return={algorithm.failure_return:g}; they are the best and the worst return of an episode"
        yield f"algorithm.success_return={algorithm.success_return:g}: must exceed {worst}"
    if memory.retrieval == "value" and memory.candidates < memory.top_k:
        yield f"memory.candidates={memory.candidates}: must be at least top_k={memory.top_k}, which are shown of them"
    if settings.critic.path is not None and model.val_temperature == 0:
        why = "would be alike, and vLLM refuses them"
        yield f"model.val_temperature=0: the {settings.critic.samples} samples of critic.path {why}; raise it"
    if memory.similarity_statistics and memory.similarity_statistics[1] <= 0:
        yield f"memory.similarity_statistics={memory.similarity_statistics}: the second, a deviation, must be above 0"
    for key in ("max_prompt_tokens", "max_episode_tokens") if algorithm.name == "empo2" else ():
        if memory.episode_tokens >= (tokens := getattr(model, key)):
            limit = f"model.{key}={tokens}, which holds the agent's own text, too"
            yield f"memory.episode_tokens={memory.episode_tokens}: must be below {limit}"
    try:
        settings.reflection.prompt.format(score="0", outcome="", words=1)
    except (LookupError, ValueError, AttributeError) as error:
        yield f"reflection.prompt: only {{score}}, {{outcome}} and {{words}} are filled in, {{{{ is a brace ({error!r})"
    if algorithm.tasks_per_step * algorithm.rollouts_per_task % gpus:
        times = f"times rollouts_per_task={algorithm.rollouts_per_task} must be a multiple of the {gpus} GPUs"
        yield f"algorithm.tasks_per_step={algorithm.tasks_per_step}: {times}"


# Of one turn (reply, observation and chat template) without tips: 37 and 57 measured over 30 turns of ScienceWorld.
_TURN_TOKENS = 40


def warnings_of(settings: Settings) -> Iterator[str]:
    """Yield one-line warnings about settings that may not fit together; they do not stop a run."""
    model, hardware, algorithm, memory = settings.model, settings.hardware, settings.algorithm, settings.memory
    if hardware.device == "gpu" and hardware.micro_batch > 1:
        why = "rows of different lengths get a dense mask, for which PyTorch has no flash kernel; 1 is faster"
        yield f"hardware.micro_batch={hardware.micro_batch}: {why}"
    episodes, gpus = algorithm.tasks_per_step * algorithm.rollouts_per_task, hardware.gpus
    if hardware.device == "gpu" and algorithm.updates_per_step > 1 and episodes < algorithm.updates_per_step * gpus:
        few = f"an update has {episodes / algorithm.updates_per_step:.3g} rows for {gpus} GPUs, and the others wait"
        yield f"algorithm.updates_per_step={algorithm.updates_per_step}: {few}; take {max(1, episodes // gpus)}"
    if algorithm.name != "empo2":
        return
    tipped = min(algorithm.memory_probability, algorithm.off_policy_probability) > 0 and not algorithm.distills
    if tipped and algorithm.baseline == "paired" and algorithm.off_policy_old_log_probs == "with-tips":
        why = "tips that fail are imitated or ignored, never unlearned, since the clip drops what they recommend"
        fix = "take algorithm.form=internalise, or algorithm.off_policy_old_log_probs=tip-free (docs/algorithm.md)"
        yield f"algorithm.baseline=paired with off_policy_loss=ratio: {why}; {fix}"
    tokens = f"memory.episode_tokens={memory.episode_tokens}"
    if memory.episode_tokens > model.max_prompt_tokens // 2:
        prompt = f"model.max_prompt_tokens={model.max_prompt_tokens}"
        yield f"{tokens}: tips may fill more than half of {prompt}, which holds the agent's prompt, too"
    if memory.episode_tokens < memory.top_k * settings.reflection.max_tokens:
        tips = f"memory.top_k={memory.top_k} tips of reflection.max_tokens={settings.reflection.max_tokens}"
        yield f"{tokens}: may not hold {tips}; an episode is shown those that fit"
    steps = settings.tasks.args.get("max_steps")
    if isinstance(steps, int) and steps * _TURN_TOKENS + memory.episode_tokens > model.max_episode_tokens:
        limit = f"model.max_episode_tokens={model.max_episode_tokens}; what lies beyond is not trained"
        turns = f"at about {_TURN_TOKENS} tokens a turn, and {tokens}"
        yield f"tasks.args.max_steps={steps}: {turns}, an episode may outgrow {limit}"


def traces_endpoint(settings: Settings) -> str | None:
    """Return the URL that spans are sent to: of ``gateway.traces``, else of OpenTelemetry's own variables.

    Raises:
        ConfigError: these ask for another protocol than OTLP over HTTP.
    """
    own, (whole, base) = settings.gateway.traces, map(os.environ.get, TRACES_VARIABLES)
    switched_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if own is None and (switched_off or os.environ.get("OTEL_TRACES_EXPORTER") == "none" or not (whole or base)):
        return None
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (protocol := os.environ.get(name)) not in (None, "", "http/protobuf"):
            raise ConfigError(f"{name}={protocol}: must be http/protobuf; give the collector's port for it, often 4318")
    given = own or whole or base or ""
    return given if not own and whole else f"{given.rstrip('/').removesuffix(_TRACES)}{_TRACES}"


def imported(name: str, key: str) -> Any:
    """Return what the setting ``key`` names as ``module:attribute``, also of a module in the current folder.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, attribute = name.split(":")
    sys.path += [os.getcwd()] if os.getcwd() not in sys.path else []
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        said = error if isinstance(error, Exception) else f"it ends with sys.exit({error})"
        raise ConfigError(f"{key}={name!r}: cannot be imported: {said}") from None
