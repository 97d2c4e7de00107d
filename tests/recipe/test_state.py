"""The state of an episode: the newest observation, and the real embedder tells states apart by it."""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from empo2.memory import SentenceEmbedder
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.gateway.episodes.reflector import transcript
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.messages import newest_observation, task_in

from .harness import assistant, user

DEFAULT = StateReader(load_settings().memory)
chat_state, prompt_state = DEFAULT.of_chat, DEFAULT.of_prompt
SYSTEM = {"role": "system", "content": "You play a game."}
# Observations of ScienceWorld, WebShop and TextWorld-Express, some shortened; near each other, and of different states.
DIFFERENT = {
    "drain": ("The drain is now open.", "The drain is now closed."),
    "room": ("You move to the kitchen.", "You move to the hallway."),
    "thermometer": (
        "the thermometer measures a temperature of 27 degrees celsius",
        "the thermometer measures a temperature of 29 degrees celsius",
    ),
    "fridge": (
        "You open the fridge. The fridge contains a red bell pepper, and a knife.",
        "You open the fridge. The fridge contains a red bell pepper, a cookbook, and a knife.",
    ),
    "product": (
        "Instruction: [SEP] find me oil free shampoo bar, scent vanilla [SEP] Back to Search [SEP] < Prev [SEP] scent"
        " [SEP] vanilla [SEP] jasmine [SEP] Parsonel Oil Free Shampoo Bar For Travel [SEP] Price: $7.12 [SEP] Buy Now",
        "Instruction: [SEP] find me oil free shampoo bar, scent vanilla [SEP] Back to Search [SEP] < Prev [SEP] scent"
        " [SEP] citrus [SEP] unscented [SEP] Quilunet Hand Made Shampoo Bar, Beeswax [SEP] Price: $41.55 [SEP] Buy Now",
    ),
}


def episode(observation: str) -> list[dict[str, Any]]:
    begin = user("Your task is to boil water.\n\nThis room is called the workshop.")
    return [SYSTEM, begin, assistant("look around"), user(observation)]


@pytest.fixture(scope="module")
def minilm() -> SentenceEmbedder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SentenceEmbedder("all-MiniLM-L6-v2")


def cosine(minilm: SentenceEmbedder, *observations: str) -> float:
    one, other = (minilm.embed([chat_state(episode(observation))])[0] for observation in observations)
    return float(np.dot(one, other))


BLOCKS = [
    ("<a-reminder>x</a-reminder> go", "go"),
    ("go <environment_context>a</environment_context>north <skills>b</skills>", "go north"),
    ("<context>a <context>b</context> c</context>", "c</context>"),  # to the first end
    ("<context>a</skills> <skills>b</skills>", "<context>a</skills>"),  # one that does not end is text
    ("<task>a</task>", "<task>a</task>"),
    ("a </context>", "a </context>"),
]


@pytest.mark.parametrize(("text", "state"), BLOCKS)
def test_blocks_of_an_agents_program_are_no_state(text: str, state: str):
    assert chat_state([user(text)]) == state


@pytest.mark.parametrize("unit", ["<context>", "<context-", "<context></", "<a-context>b</a-context>", "</context>"])
def test_what_an_agent_writes_is_read_in_linear_time(unit: str):
    """An unclosed block for each of 100,000 others took a quarter of an hour, in which the gateway answered nobody."""
    text, numbered = unit * 20_000, "".join(f"<context{n}>" for n in range(20_000))
    begin = time.process_time()
    for said in (text, f"{text}</", f"{numbered}</"):
        newest_observation([user(said)])
        task_in(said)
        transcript(["", said, "f0" * 100_000], ["go"] * 3, 12_000)
    assert time.process_time() - begin < 5  # quadratic: 36


def test_the_state_is_the_newest_observation():
    """Error of the authors' key: MiniLM reads the beginning of a chat only, which hardly depends on the state."""
    chat = [SYSTEM, user("find the lamp\n\nYou are in the hall.")]
    assert chat_state(chat) == "find the lamp\n\nYou are in the hall."
    chat += [assistant("go north"), user([{"type": "text", "text": "You are in"}, {"type": "text", "text": "a cave."}])]
    assert chat_state(chat) == "You are in\na cave."
    chat += [assistant("look"), {"role": "tool", "tool_call_id": "1", "content": "a lamp"}]
    assert chat_state(chat) == "a lamp"
    assert chat_state([*chat, assistant("I take")]) == "a lamp"
    assert chat_state([SYSTEM]) == chat_state([]) == chat_state([user(None)]) == ""
    assert chat_state([user("a" * 1000 + "b" * 1000)]) == "a" * 1000 + "b" * 200
    result = {"role": "tool", "tool_call_id": "1", "content": "a" * 1000 + "b" * 1000}
    assert chat_state([user("go"), assistant("look"), result]) == "a" * 600 + " ... " + "b" * 600
    assert prompt_state("short") == "short"
    assert prompt_state("find the lamp\n\n" + "x" * 2000 + "a lamp") == "x" * 1194 + "a lamp"  # its end


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_states_count_as_two(minilm: SentenceEmbedder, name: str):
    """With the task in the text, an open and a closed drain had a cosine of 0.99."""
    assert cosine(minilm, *DIFFERENT[name]) <= load_settings().algorithm.novelty_similarity


def test_a_list_in_another_order_is_the_same_state(minilm: SentenceEmbedder):
    room = (
        "This room is called the kitchen. In it, you see: the agent, a substance called air, a counter. On the counter"
        " is: a bowl (containing a red apple, a banana, an orange), {}. You also see: a door to the hallway (that is"
        " open), a door to the outside (that is closed)"
    )
    orders = [room.format(things) for things in ("a drawer, a lighter", "a lighter, a drawer")]
    assert cosine(minilm, *orders) > load_settings().algorithm.novelty_similarity


def test_states_of_one_task_are_mostly_less_similar_than_tips_must_be(minilm: SentenceEmbedder):
    """With the task in each text, 94 to 97 % of the pairs were more similar, so that any state found any tip."""
    keys = minilm.embed([chat_state(episode(one)) for one, _ in DIFFERENT.values()])
    similar = (keys @ keys.T)[np.triu_indices(len(keys), 1)] > load_settings().memory.min_similarity
    assert similar.mean() < 0.25


def reader(state: str, characters: int = 1200) -> StateReader:
    return StateReader(load_settings(layer={"memory": {"state": state, "state_characters": characters}}).memory)


def test_a_transcript_in_one_message() -> None:
    """As TextArena writes it: all turns in the newest message, of which only the end is new."""
    turns = [f"Turn {number}: you are in room {number * number}." for number in range(60)]
    before, after = ([SYSTEM, user("\n".join(turns[:count]))] for count in (58, 59))
    assert chat_state(before) == chat_state(after)
    assert reader("end", 20).of_chat(before) == "ou are in room 3249."
    assert reader("end", 20).of_chat(after) == "ou are in room 3364."
    assert reader(r"regex:in (room \d+)").of_chat(after) == "room 3364"
    assert reader(r"regex:in (room \d+)", 4).of_chat(after) == "room"
    assert reader("regex:cellar", 5).of_chat(after) == "3364."  # without a match the end
    assert reader("beginning", 6).of_prompt("one two three") == " three"


def newest(messages: Sequence[Any]) -> str:
    return messages[-1]["content"]


def test_a_function_of_the_messages() -> None:
    made = reader(f"{__name__}:newest")
    assert (made.of_chat([user("a"), user("b")]), made.of_prompt("c")) == ("b", "c")
    assert made.of_chat([]) == ""  # it raises: the call goes on without a state


def test_states_that_are_refused() -> None:
    for state, message in (
        ("middle", "must be beginning, end, regex:PATTERN"),
        ("regex:(", "not a regular expression: missing "),
        ("nowhere:state", "cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=f"memory.state=.*{message}"):
            reader(state)
