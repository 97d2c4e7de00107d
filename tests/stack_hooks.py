"""A user's hook, in a file of its own as agent-lightning wants it: it records what was sampled by which weights."""

import json
import os
from typing import Any

from agentlightning.hooks import RolloutHooks


class Recorder(RolloutHooks):
    """Writes each rollout that ended well as a line of RECORDED: its task, its tag, and the calls of its model."""

    def on_succeeded(self, rollout: Any, events: dict[str, list[Any]], store: Any) -> None:
        calls = [event for attempt in events.values() for event in attempt if event.event_type == "model_request"]
        tag = getattr(rollout.metadata, "empo2", None)
        line = {"rollout": rollout.rollout_id, "task": rollout.input["name"], "tag": tag, "calls": []}
        for call in calls:
            choice = call.data["response"]["choices"][0]
            line["calls"].append(
                {
                    "version": call.data["model_version"],
                    "prompt": call.data["response"]["prompt_token_ids"],
                    "reply": choice["token_ids"],
                    "log_probs": [token["logprob"] for token in choice["logprobs"]["content"]] if tag else None,
                }
            )
        with open(os.environ["RECORDED"], "a") as file:
            file.write(json.dumps(line) + "\n")
