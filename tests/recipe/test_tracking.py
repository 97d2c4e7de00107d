"""``run.loggers``: what they write, and where."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from empo2.recipe.config import load_settings
from empo2.recipe.trainer.verl_config import build_verl_config

from ..processes import until

STEPS = {1: {"training/return": 0.25, "val/return": 1.0}, 2: {"training/return": -3.5}}


@pytest.mark.stack
@pytest.mark.usefixtures("offline_wandb")
def test_tensorboard_and_wandb_write_to_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from empo2.recipe.trainer.tracking import RunTracking

    for name in ("TENSORBOARD_DIR", "WANDB_DIR"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = tmp_path / "run"
    run.mkdir()
    settings = load_settings("cpu", ["run.loggers=[tensorboard, wandb]"])
    made = build_verl_config(settings, model_path="m", run_directory=run, gateway_url="", gateway_key="")
    config: Any = OmegaConf.to_container(made, resolve=True)
    trainer = config["trainer"]
    assert (trainer["project_name"], trainer["experiment_name"]) == ("empo2", "run")
    tracking = RunTracking("empo2", "run", default_backend=trainer["logger"], config=config)
    for step, metrics in STEPS.items():
        tracking.log(metrics, step=step)
    del tracking  # closes them

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert found == {"training/return": [(1, 0.25), (2, -3.5)], "val/return": [(1, 1.0)]}
    histories = "offline-run-*/*.wandb"  # a process of wandb's writes it
    until(lambda: any(b"training/return" in each.read_bytes() for each in (run / "wandb").glob(histories)))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, **metrics} for step, metrics in STEPS.items()]
    assert list((tmp_path / "elsewhere").iterdir()) == []
