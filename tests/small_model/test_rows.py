"""Training rows: notes true or false as labelled, chats as agent and gateway make them, the right tokens learned."""

import random
from pathlib import Path

import pytest

from empo2.agents.houses.agent import SYSTEM
from empo2.agents.houses.house import House
from empo2.small_model.houses import disguised
from empo2.small_model.make import reflections
from empo2.small_model.notes import parse
from empo2.small_model.rows import READING, Message, Row, rows
from empo2.small_model.train import ACTION_WEIGHT, encode

from ..recipe.model_server import MODEL, tokenizer

pytestmark = pytest.mark.slow

DOORS = {
    "kitchen": {"north": "pantry", "east": "hall"},
    "pantry": {"south": "kitchen"},
    "hall": {"north": "den", "east": "study", "south": "porch", "west": "kitchen"},
    "den": {"south": "hall", "east": "attic"},
    "study": {"west": "hall", "north": "attic"},
    "attic": {"west": "den", "south": "study", "east": "tower"},
    "porch": {"north": "hall", "south": "garden"},
    "garden": {"north": "porch", "east": "shed"},
    "shed": {"west": "garden"},
    "tower": {"west": "attic"},
}


def some_rows() -> list[Row]:
    generator = random.Random(0)
    houses = [disguised(House("kitchen", "shed", DOORS), generator) for _ in range(300)]
    return rows(houses, 300, READING, reflections(), generator)


@pytest.fixture(scope="module")
def made() -> list[Row]:
    return some_rows()


def test_every_kind_is_there_in_its_share_and_every_row_teaches_something(made: list[Row]):
    for kind, percent in READING.kinds.items():
        assert 0.5 * percent < sum(row.kind == kind for row in made) / 3 < 1.7 * percent
    assert all(any(message.learned for message in row.messages) for row in made)
    assert some_rows() == made  # the same seed gives the same rows


def test_notes_are_true_or_false_as_their_kind_says(made: list[Row]):
    for row in made:
        trues = [true for _, true in row.notes]
        if row.kind in ("success", "failure"):
            assert trues and all(trues)
        if row.kind in ("false", "mixed"):
            assert not all(trues)
        if row.kind == "failure":
            assert not any(note.found for note, _ in row.notes)


def test_what_a_row_teaches_to_write_is_true_of_its_own_episode(made: list[Row]):
    for row in made:
        if row.note is None:
            continue
        text = row.messages[-1].content
        assert parse(text) == row.note
        assert (row.note.true_of(row.house), row.note.found) == (True, row.success)
        shown = " ".join(message.content for message in row.messages[:-2] if message.role == "user")
        assert all(f"You are in the {room}." in shown for room in (row.note.end, *(room for room, _ in row.note.way)))


def test_a_chat_is_an_episode_of_the_game(made: list[Row]):
    for row in made:
        assert row.messages[0] == Message("system", SYSTEM)
        assert [m.role for m in row.messages[1:]] == ["user", "assistant"] * (len(row.messages) // 2)
        room = row.house.start
        for asked, reply in zip(row.messages[1::2], row.messages[2::2], strict=True):
            if asked.content.startswith("The episode is over"):
                assert row.success == ("was completed" in asked.content)
                break
            assert f"You are in the {room}." in asked.content.splitlines()[-1]
            assert ("You see a coin." in asked.content) == (room == row.house.coin)
            if reply.content == "take coin":
                assert row.success
            elif reply.learned:
                assert reply.content.removeprefix("move ") in row.house.doors[room]
            room = row.house.doors[room].get(reply.content.removeprefix("move "), room)


def test_the_loss_is_on_replies_and_the_end_of_their_turns():
    chat = [
        Message("system", "Reply."),
        Message("user", "You are in the den."),
        Message("assistant", "move west", learned=True),
        Message("user", "You are in the attic."),
        Message("assistant", "move up"),
        Message("user", "Write one note."),
        Message("assistant", "No coin as far as the den.", learned=True),
    ]
    encoded = encode(chat, tokenizer())
    learned = tokenizer().decode([encoded.ids[at] for at in encoded.learned])
    assert learned == "move west<|im_end|>No coin as far as the den.<|im_end|>"
    assert tokenizer().decode(encoded.ids).count("<|im_start|>") == len(chat)
    action, note = (len(tokenizer()(text).input_ids) + 1 for text in ("move west", "No coin as far as the den."))
    assert encoded.weights == [ACTION_WEIGHT] * action + [1] * note


def test_loss_and_gradient_are_those_of_the_whole_row():
    import torch

    from empo2.small_model.train import Settings, lora, reply_loss

    torch.manual_seed(0)
    peft_model = lora(Path(MODEL), Settings(first_layer=28)).float()
    for name, weight in peft_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)  # at 0 the gradient of the other half would be 0
    chat = [Message("user", "You are in the den."), Message("assistant", "move west", learned=True)]
    chat += [Message("user", "What now?"), Message("assistant", "take coin", learned=True)]
    encoded = encode(chat, tokenizer())
    ids = torch.tensor([encoded.ids])
    labels = torch.full_like(ids, -100)
    labels[0, encoded.learned] = ids[0, encoded.learned]
    weights = [weight for weight in peft_model.parameters() if weight.requires_grad]
    ours = reply_loss(peft_model.get_base_model(), encoded)
    theirs = peft_model(input_ids=ids, labels=labels).loss * len(encoded.learned) * ACTION_WEIGHT  # a mean, of actions
    assert torch.isclose(ours, theirs, rtol=1e-4)
    for one, other in zip(torch.autograd.grad(ours, weights), torch.autograd.grad(theirs, weights), strict=True):
        assert (one - other).norm() < 1e-3 * other.norm()  # rounding of fp32 is 2e-4
    trained = [name for name, weight in peft_model.named_parameters() if weight.requires_grad]
    assert {name.split("layers.")[1].split(".")[0] for name in trained} == {"28", "29"}
