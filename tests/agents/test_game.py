"""How a turn is worded and a reply is read."""

import pytest

from empo2.agents.text_game import actions

CHOICES = ["look around", "focus on air", "go to kitchen"]


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("1", "look around"),
        ("3 go to kitchen", "go to kitchen"),
        ("I choose 2.", "focus on air"),
        ("4, or else 1", None),  # the first number is what the reply names
        ("0", None),
        ("12", None),
        ("", None),
        ("²", None),
        ("1" * 10_000, None),
        ("数3", "go to kitchen"),
    ],
)
def test_the_first_number_of_a_reply_chooses(reply, action):
    assert actions.chosen(reply, CHOICES) == action


def test_a_typed_action_is_the_first_line_uncorrected():
    assert actions.typed(" Höre 数 zu \nbecause I must") == "Höre 数 zu"
    assert actions.typed("") == ""


def test_actions_are_drawn_by_episode_and_step(episode):
    valid = [f"look at {number}" for number in range(100)]
    first = actions.draw(valid, episode(seed=1), step=0)
    assert first == actions.draw(valid, episode(seed=1), step=0)
    assert len(set(first)) == 12
    others = [(episode(seed=2), 0), (episode(seed=1), 1), (episode(seed=1, variation=1), 0), (episode(task="boil"), 0)]
    assert all(actions.draw(valid, other, step) != first for other, step in others)
    assert sorted(actions.draw(valid[:5], episode(), step=0)) == valid[:5]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("focus on air", "focus on air"),
        ("go to the kitchen", "go to kitchen"),  # 3/4, against 2/5 of "go to art studio"
        ("GO kitchen", "go to kitchen"),  # 2/3
        ("move water to jug", "move water to jug"),  # valid, although "move jug to water" has the same words
        ("move the water to jug", "move water to jug"),  # a tie of 4/5, decided by the order of words
        ("now move the jug to water", "move jug to water"),
        ("open", "open door to hall"),  # a tie of 1/4, decided by the alphabet
        ("", "activate sink"),
        ("数", "activate sink"),
    ],
)
def test_the_nearest_action_shares_most_words(text, action):
    valid = ["open door to yard", "open door to hall", "focus on air", "go to kitchen", "go to art studio"]
    valid += ["move jug to water", "move water to jug", "activate sink"]
    assert actions.nearest(text, valid) == action
    assert actions.nearest(text, valid[::-1]) == action
