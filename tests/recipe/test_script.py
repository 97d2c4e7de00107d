"""An agent-lightning training script with one import changed, up to the point where it would train."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from empo2.recipe.trainer import ray_environment  # before verl is imported

# isort: split
import pytest
from datasets import Dataset

from empo2.recipe.errors import ConfigError
from empo2.recipe.trainer import entrypoint
from empo2.recipe.trainer.compat import fork_server
from empo2.recipe.trainer.trainer import Empo2Trainer

from .harness import KEY, running_gateway
from .model_server import MODEL

sys.path.insert(0, str(Path(__file__).parents[1]))
import gsm8k_script

pytestmark = [  # verl's
    pytest.mark.filterwarnings("ignore:Disabled critic:UserWarning"),
    pytest.mark.filterwarnings("ignore:Warning. Class 'verl:FutureWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

QUESTIONS = [f"How many are {number} apples and {number} apples?" for number in range(1, 6)]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Empo2Trainer]]:
    """The script, without Ray and without training; the trainers that would have trained."""
    reached: list[Empo2Trainer] = []
    monkeypatch.setattr(fork_server, "start", lambda: None)
    monkeypatch.setattr(ray_environment, "start_ray", lambda config: None)
    monkeypatch.setattr(entrypoint, "start_vllm_beside_the_policy", lambda workers, config: workers)
    for patch in ("use_tracking", "start_no_load_balancer", "give_key"):
        monkeypatch.setattr(entrypoint, patch, lambda *_: None)  # they would stay for the tests that follow
    monkeypatch.setattr(Empo2Trainer, "init_workers", lambda trainer: reached.append(trainer))
    monkeypatch.setattr(Empo2Trainer, "fit", lambda trainer: None)
    rows = [{"question": question, "answer": f"They are twice. #### {n * 2}"} for n, question in enumerate(QUESTIONS)]
    file = tmp_path / "rows.parquet"
    Dataset.from_list(rows).to_parquet(file)

    def run(url: str, *overrides: str) -> list[Empo2Trainer]:
        reached.clear()
        own = [f"agentlightning.agl_key={KEY}", f"actor_rollout_ref.model.path={MODEL}"]
        gsm8k_script.main(["--train-file", str(file), "--val-file", str(file), "--agl-base-url", url, *own, *overrides])
        return reached

    return run


@pytest.mark.slow
async def test_one_changed_import_is_enough(tmp_path: Path, script: Any, capsys: Any) -> None:
    """The rest of the script has never heard of EMPO²: no scope, no range of rewards, no agent of ours."""
    async with running_gateway(tmp_path, "tasks.source=null") as gateway:
        url = str(gateway.client.base_url)
        (trainer,) = script(url)
        settings = trainer.settings
        algorithm = settings.algorithm
        assert (settings.memory.scope, algorithm.scale, algorithm.success_return) == ("all-tasks", 1, 1)
        assert (algorithm.tasks_per_step, algorithm.rollouts_per_task, algorithm.updates_per_step) == (2, 4, 1)
        assert (settings.agent.class_, settings.tasks.source) == (None, None)
        assert [row["task"]["answer"] for row in trainer.train_dataset] == ["0", "2", "4", "6", "8"]
        # A step that plays again draws more tasks than an epoch has; the steps end the training, not the epochs.
        assert (trainer.total_training_steps, trainer.config.trainer.total_epochs) == (4, sys.maxsize)
        actor = trainer.config.actor_rollout_ref.actor
        assert (algorithm.learning_rate, algorithm.clip_low) == (actor.optim.lr, actor.clip_ratio_low)
        assert "memory.scope" not in capsys.readouterr().out

        (trainer,) = script(url, "empo2.algorithm.seed=5", "empo2.memory.scope=[answer]")  # two epochs of two steps
        assert (trainer.settings.algorithm.seed, trainer.settings.memory.scope) == (5, ["answer"])
        assert "memory.scope" not in capsys.readouterr().out
        script(url, "empo2.memory.scope=[answer]", "trainer.total_epochs=1")
        assert "WARNING: memory.scope=['answer']: only 0% of the memory rollouts" in capsys.readouterr().out
        script(url, "agentlightning.trace_aggregator.trajectory_max_prompt_length=400")
        assert "start empo2 gateway with memory.episode_tokens=100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+empo2.algorithm.seed=5", r"\+empo2: the \+ belongs to Hydra's command line"),
        ("empo2.memory.scope=[variation]", r"memory.scope=\['variation'\]: tasks have no field 'variation'"),
        ("empo2.algorithm.sead=5", r"did you mean algorithm.seed\?"),
        (
            "empo2.algorithm.form=internalise",
            r"=1: the script has 0, .*kl_loss_coef=1 and use_kl_loss=True",
        ),
        ("empo2.algorithm.learning_rate=0", r"learning_rate=0: the script has 1e-06, .*actor.optim.lr=0"),
        ("agentlightning.trace_aggregator.trajectory_max_total_length=900", "set trajectory_max_response_length"),
    ],
)
def test_wrong_settings_are_told_before_anything_is_asked(script: Any, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        script("http://127.0.0.1:9", override)
