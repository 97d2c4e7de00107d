"""The agent that answers HLE's questions; `hle.yaml` has its settings.

HLE is not to be trained on: a training refuses rows with a canary.
"""

import os
from dataclasses import replace

from ..text_game.agent import ContextOverflow, Server, TextAgent, connect
from ..text_game.game import Outcome
from .questions import CHOICE, Episode, is_choice, is_same

JUDGE = "HLE_JUDGE"  # a variable: the name of the judge's model at `gateway.other_server`

SYSTEM = (
    "You answer an examination question. Think first, then end your reply with one line that begins with "
    '"Answer:", followed by the answer alone; of a question with choices, by the letter of one.'
)
JUDGEMENT = """\
Question: {question}

The right answer: {answer}

A candidate's reply: {reply}

Is the reply's final answer the right one? It may be written otherwise, but must mean the same; a number may differ by
rounding alone. Say yes or no, nothing else."""


class HLEAgent(TextAgent[Episode]):
    """Answer one question; the variables are those of `Episode.env_map()`. The reward is 1 if it is right, else 0.

    A choice is right by its letter; any other answer if the judge says so, and without a judge only as the same text.
    """

    episode = Episode

    def play(self, episode: Episode, server: Server) -> Outcome:
        try:
            reply = connect(server)(
                [{"role": "system", "content": SYSTEM}, {"role": "user", "content": episode.question}]
            )
        except ContextOverflow:
            return Outcome(0, f"{episode.id}: the question is longer than the model's context", full_score=1)
        if episode.answer_type == CHOICE:
            right, by = is_choice(reply, episode.answer), "its letter"
        elif judge := os.environ.get(JUDGE):
            question = JUDGEMENT.format(question=episode.question, answer=episode.answer, reply=reply)
            said = connect(replace(server, model=judge), limited=False)([{"role": "user", "content": question}])
            right, by = said.strip().lower().startswith("yes"), "the judge"
        else:
            right, by = is_same(reply, episode.answer), "its text"
        return Outcome(int(right), f"{episode.id}: {'right' if right else 'wrong'} by {by}", full_score=1)
