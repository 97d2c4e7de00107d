"""Training rows: notes true or false as labelled, chats as agent and gateway make them, the right tokens learned."""

import random
from pathlib import Path

import pytest

from empo2.agents.houses.agent import SYSTEM
from empo2.agents.houses.house import House
from empo2.recipe.launcher.model_files import SMOLLM2, resolve_model
from empo2.small_model.houses import disguised
from empo2.small_model.make import reflections
from empo2.small_model.notes import parse, render
from empo2.small_model.rows import READING, WRITING, Message, Mix, Row, rows
from empo2.small_model.train import ACTION_WEIGHT, encode

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


def some_rows(mix: Mix, count: int = 300) -> list[Row]:
    generator = random.Random(0)
    houses = [disguised(House("kitchen", "shed", DOORS), generator) for _ in range(count)]
    return rows(houses, count, mix, reflections(), generator)


@pytest.fixture(scope="module")
def made() -> list[Row]:
    return some_rows(READING)


def walked(house: House, way: list[str]) -> str | None:
    """Where one comes out who does what a note says word for word; an independent reading of "den move east"."""
    room = house.start
    for step in way:
        name, _, direction = step.rpartition(" move ")
        if name != room or direction not in house.doors[room]:
            return None
        room = house.doors[room][direction]
    return room


def holds(text: str, house: House) -> bool:
    """Whether a note in the first wording holds, by walking the house."""
    if text.startswith("Coin in the "):
        coin, _, rest = text.removeprefix("Coin in the ").removesuffix(".").partition(": ")
        *way, last = rest.split(", ")
        return last == f"{coin} take coin" and walked(house, way) == house.coin == coin
    end, _, rest = text.removeprefix("No coin as far as the ").removesuffix(".").partition(": ")
    *way, last = rest.split(", ")
    seen = [walked(house, way[:steps]) for steps in range(len(way) + 1)]
    return last == f"{end} no coin" and seen[-1] == end and house.coin not in seen


def test_a_disguise_keeps_the_plan_of_a_house():
    house = House("kitchen", "shed", DOORS)
    for seed in range(20):
        other = disguised(house, random.Random(seed))
        assert sorted(map(len, other.doors.values())) == sorted(map(len, DOORS.values()))
        for room, exits in other.doors.items():
            for direction, behind in exits.items():
                back = {"north": "south", "south": "north", "east": "west", "west": "east"}[direction]
                assert other.doors[behind][back] == room
        assert other.coin != other.start


def test_every_kind_is_there_in_its_share_and_every_row_teaches_something(made: list[Row]):
    for kind, percent in READING.kinds.items():
        assert 0.5 * percent < sum(row.kind == kind for row in made) / 3 < 1.7 * percent
    assert all(any(message.learned for message in row.messages) for row in made)
    assert some_rows(READING) == made  # the same seed gives the same rows


def test_the_second_stage_writes_what_no_note_told():
    untold = {
        mix: sum(row.success and row.note is not None and not row.notes for row in some_rows(mix))
        for mix in (READING, WRITING)
    }
    assert untold[WRITING] > 3 * untold[READING] > 0


def test_notes_are_true_or_false_as_labelled(made: list[Row]):
    for row in made:
        for note, true in row.notes:
            assert holds(render(note), row.house) is true, (row.kind, render(note), row.house)
        trues = [true for _, true in row.notes]
        if row.kind in ("success", "failure"):
            assert trues and all(trues)
        if row.kind in ("false", "mixed"):
            assert not all(trues)
        if row.kind == "failure":
            assert not any(note.found for note, _ in row.notes)


def test_notes_of_another_house_are_mostly_false(made: list[Row]):
    """A note that leads no farther than the first door may be true of both, whose first room has the same name."""
    others = [row.notes for row in made if row.kind == "other house"]
    for note, true in (pair for notes in others for pair in notes):
        assert not true or (not note.found and len(note.way) <= 1)
    assert sum(all(true for _, true in notes) for notes in others) < len(others) / 5


def test_what_a_row_teaches_to_write_is_true_of_its_own_episode(made: list[Row]):
    for row in made:
        if row.note is None:
            continue
        text = row.messages[-1].content
        assert holds(text, row.house)
        assert parse(text) == row.note
        assert row.note.found == row.success
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


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_model(SMOLLM2))


def test_the_loss_is_on_replies_and_the_end_of_their_turns(tokenizer):
    chat = [
        Message("system", "Reply."),
        Message("user", "You are in the den."),
        Message("assistant", "move west", learned=True),
        Message("user", "You are in the attic."),
        Message("assistant", "move up"),
        Message("user", "Write one note."),
        Message("assistant", "No coin as far as the den.", learned=True),
    ]
    encoded = encode(chat, tokenizer)
    learned = tokenizer.decode([encoded.ids[at] for at in encoded.learned])
    assert learned == "move west<|im_end|>No coin as far as the den.<|im_end|>"
    assert tokenizer.decode(encoded.ids).count("<|im_start|>") == len(chat)
    action, note = len(tokenizer("move west").input_ids) + 1, len(tokenizer("No coin as far as the den.").input_ids) + 1
    assert encoded.weights == [ACTION_WEIGHT] * action + [1] * note


def test_loss_and_gradient_are_those_of_the_whole_row(tokenizer):
    """Logits at the trained positions alone give what the loss over the whole row gives."""
    import torch

    from empo2.small_model.train import Settings, lora, reply_loss

    torch.manual_seed(0)
    peft_model = lora(Path(resolve_model(SMOLLM2)), Settings(first_layer=28)).float()
    for name, weight in peft_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)  # at 0 the gradient of the other half would be 0
    chat = [Message("user", "You are in the den."), Message("assistant", "move west", learned=True)]
    encoded = encode([*chat, Message("user", "What now?"), Message("assistant", "take coin", learned=True)], tokenizer)
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
