"""HLE: the reader of its data set, verdicts, the judge, and that nobody trains on it. All questions are made up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

from empo2.agents.hle import __main__ as command_line
from empo2.agents.hle.agent import JUDGE, HLEAgent
from empo2.agents.hle.questions import SETTINGS, Episode, answer_of, is_choice, is_same, panel_of
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.evaluation.panels import load_panel
from empo2.recipe.files.tasks import load_tasks

OWN = str(SETTINGS.with_name("own.json"))
CHOICE, EXACT = "multipleChoice", "exactMatch"


def a_row(number: int, **changes: Any) -> dict[str, Any]:
    """A row with all fields of the data set."""
    row = {"id": str(number), "question": f"Question {number}?", "answer": "B", "answer_type": CHOICE, "image": ""}
    more = {"image_preview": None, "author_name": "A", "rationale": "R", "rationale_image": None, "raw_subject": "S"}
    return {**row, **more, "category": "Math", "canary": "a canary", **changes}


def an_episode(answer: str, kind: str = EXACT) -> Episode:
    return Episode(id="1", question="What?", answer=answer, answer_type=kind, category="Math", canary="c")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_panel_has_the_text_questions_of_a_file(kind: str, tmp_path: Path, run_main: Callable[..., tuple]):
    rows = [a_row(0), a_row(1, image="data:image/png;base64,AAAA"), a_row(2, answer_type=EXACT, category="Law")]
    file, panel = tmp_path / f"hle.{kind}", tmp_path / "hle.json"
    if kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        write_table(pyarrow.Table.from_pylist(rows), file)
    code, out, err = run_main(command_line.main, "import", file, "--output", panel)
    assert (code, err) == (0, "") and out == f"{panel}: 2 text questions; 1 with images are left out\n"
    loaded = load_panel(str(panel))
    assert loaded.groups() == {"Math": [0], "Law": [1]}
    kept = ("id", "question", "answer", "answer_type", "category", "canary")
    assert list(loaded.rows) == [{name: rows[number][name] for name in kept} for number in (0, 2)]
    settings = load_settings("cpu", world=loaded.config)
    assert {*settings.agent.env} == {*Episode.env_map(), "HLE_MAX_TOKENS"}
    assert run_main(command_line.main, "import", file, "--output", panel)[0] == 2


def test_a_source_that_is_none_is_named(tmp_path: Path, run_main: Callable[..., tuple], monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "other.jsonl").write_text('{"question": "What?"}')
    (tmp_path / "images.jsonl").write_text(json.dumps(a_row(0, image="x")))
    (tmp_path / "kind.jsonl").write_text(json.dumps(a_row(0, answer_type="essay")))
    for source, says in (
        (tmp_path / "other.jsonl", "other.jsonl has not the fields of HLE (KeyError('id'))"),
        (tmp_path / "images.jsonl", "images.jsonl has no text question"),
        (tmp_path / "kind.jsonl", "answer_type 'essay' is unknown"),
        (tmp_path / "no.jsonl", "No such file"),
        ("hle.csv", "hle.csv is neither .jsonl nor .parquet nor hub:NAME"),
        ("hub:cais/hle", "hub:cais/hle cannot be loaded ("),
    ):
        code, _, err = run_main(command_line.main, "import", source, "--output", tmp_path / "hle.json")
        assert code == 2 and says in err and not (tmp_path / "hle.json").exists()


def test_answers_are_compared_by_letter_or_as_text():
    assert answer_of("I think.\n**Answer:** B.\n") == "B." and answer_of("So\n\nanswer: $x^2$ ") == "x^2"
    assert answer_of("It is\n42\n") == "42" and answer_of(" ") == ""
    assert answer_of("Answer: A\nNo.\nAnswer: B") == "B"
    for reply, right in (("Answer: B", True), ("Answer: (B) 23", True), ("B", True), ("Answer: Because", False)):
        assert is_choice(reply, "B") is right
    for said in (r"\boxed{B}", r"$\boxed{\text{B}}$", r"\textbf{B}", "Option B", "choice (B)", "b", "**B**"):
        assert is_choice(f"Answer: {said}", "B") and not is_choice(f"Answer: {said}", "A"), said
    assert is_same("Answer: The Moon.", "the  moon") and not is_same("Answer: Moon", "the moon")
    for text in ("-5", ".5", "√2", "(1,2)", r"\frac{1}{2}", "$x$", "**-1**"):
        right = text.strip("*$")
        assert is_same(f"Answer: {text}", right) and is_same(f"**Answer:** {text}", right), text
        assert text == "$x$" or not is_same(f"Answer: {text}", right.lstrip("-.√(\\")), text
    for reply in ("A careful reader sees that option B", "I think so", "I"):
        assert is_choice(reply, "I") is (reply == "I") and not is_choice(reply, "A")


def test_a_line_of_a_data_set_may_have_any_character_but_a_newline(tmp_path: Path):
    source = tmp_path / "hle.jsonl"
    rows = [{name: "a" for name in ("id", "question", "answer", "category", "canary")} | {"answer_type": EXACT}] * 2
    source.write_text("".join(json.dumps(row | {"question": "a\u2028b"}, ensure_ascii=False) + "\n" for row in rows))
    assert [row["question"] for row in panel_of(str(source))[0]["rows"]] == ["a\u2028b"] * 2
    source.write_text(json.dumps(rows[0]) + "\n{")
    with pytest.raises(ValueError, match=r"hle\.jsonl: line 2 is not JSON"):
        panel_of(str(source))


@pytest.mark.parametrize("row", load_panel(OWN).rows, ids=lambda row: row["id"])
def test_a_right_reply_is_rewarded(row: dict[str, Any], play_agent: Callable[..., dict], server):
    episode = Episode(**row)
    reward = play_agent(HLEAgent, episode, [f"Let me see.\nAnswer: {row['answer']}"])
    assert (reward["value"], reward["success"]) == (1, True)
    assert play_agent(HLEAgent, episode, ["Answer: Z"])["value"] == 0
    assert server.chats[0]["messages"][1]["content"] == row["question"] and len(server.chats) == 2


def test_a_judge_decides_on_answers_that_are_no_choices(play_agent: Callable[..., dict], server):
    for verdict, value in (("Yes.", 1), ("no", 0), ("", 0)):
        server.chats.clear()
        replies = ["Answer: a half", verdict]
        assert play_agent(HLEAgent, an_episode("0.5"), replies, **{JUDGE: "judge-1"})["value"] == value
        answer, judgement = server.chats
        assert (answer["model"], judgement["model"]) == ("policy", "judge-1")
        assert "max_tokens" in answer and "max_tokens" not in judgement
        assert "0.5" not in str(answer) and "The right answer: 0.5" in judgement["messages"][0]["content"]
    server.chats.clear()
    assert play_agent(HLEAgent, an_episode("B", CHOICE), ["Answer: B"], **{JUDGE: "judge-1"})["value"] == 1
    assert len(server.chats) == 1


def test_nobody_trains_on_it(tmp_path: Path):
    file = tmp_path / "hle.jsonl"
    file.write_text("\n".join(json.dumps(a_row(number)) for number in range(20)))
    settings = load_settings("cpu", [f"tasks.source={file}"], file=SETTINGS)
    with pytest.raises(ConfigError, match="its tasks have a canary, which asks that nobody trains on them; evaluate"):
        load_tasks(settings)
