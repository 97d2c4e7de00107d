"""A training script as agent-lightning's users write it, with one import changed.

It makes the calls of agent-lightning's gsm8k example: questions and answers from parquet files, the configuration
composed, overridden by a dictionary and then by the words of the command line, and trained with that.
"""

import argparse
import importlib.resources
from typing import Any

from datasets import Dataset
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from empo2.recipe import run_empo2 as run_ppo  # was: from agentlightning.verl.entrypoint import run_ppo

OWN = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 2, "max_prompt_length": 512, "max_response_length": 512},
    "actor_rollout_ref": {
        "model": {"path": "smollm2-135m-instruct", "enable_gradient_checkpointing": True},
        "rollout": {
            "name": "vllm",
            "n": 4,
            "tensor_model_parallel_size": 1,
            "log_prob_micro_batch_size_per_gpu": 1,
            "multi_turn": {"format": "hermes"},
        },
        "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 1},
        "ref": {"log_prob_micro_batch_size_per_gpu": 1},
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "val_before_train": False,
        "logger": ["console"],
        "save_freq": -1,
        "test_freq": 10,
        "total_epochs": 2,
    },
    "agentlightning": {
        "trace_aggregator": {
            "level": "trajectory",
            "trajectory_max_prompt_length": 512,
            "trajectory_max_response_length": 512,
        },
        "local": {
            "agent_class": "examples.gsm8k.gsm8k_agent.ChatAgent",
            "env_map": {"QUESTION": "input.question", "ANSWER": "input.answer"},
        },
    },
}


def read_tasks(file: str) -> list[dict[str, Any]]:
    rows = Dataset.from_parquet(file).to_list()
    return [{"question": row["question"], "answer": row["answer"].split("####")[-1].strip()} for row in rows]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-file", required=True)
    parser.add_argument("--val-file", required=True)
    parser.add_argument("--agl-base-url", required=True)
    given, overrides = parser.parse_known_args(words)
    with initialize_config_dir(config_dir=str(importlib.resources.files("agentlightning.verl")), version_base=None):
        base = compose(config_name="config")
    OmegaConf.set_struct(base, False)
    address = {"agentlightning": {"agl_base_url": given.agl_base_url}}
    config = OmegaConf.merge(base, OWN, address, OmegaConf.from_dotlist(overrides))
    run_ppo(config, train_dataset=read_tasks(given.train_file), val_dataset=read_tasks(given.val_file))


if __name__ == "__main__":
    main()
