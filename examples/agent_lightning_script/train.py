"""An agent-lightning 1.x training script. One import is changed; the rest is agent-lightning's own form of script."""

import hydra
from omegaconf import DictConfig

from empo2.recipe import run_empo2 as run_ppo  # was: from agentlightning.verl.entrypoint import run_ppo


@hydra.main(config_path="pkg://agentlightning.verl", config_name="config", version_base=None)
def main(config: DictConfig) -> None:
    tasks = [{"number": number, "task": "guess", "variation": number} for number in (4, 7)]
    run_ppo(config, tasks, tasks)


if __name__ == "__main__":
    main()
