"""LifelongAgentBench: MySQL's results in SQLite, verdicts, whole episodes; all official tasks, where they are there."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from empo2.agents.lifelong import __main__ as command_line
from empo2.agents.lifelong import tables
from empo2.agents.lifelong.agent import SERVER, LifelongAgent, MachineAgent
from empo2.agents.lifelong.tables import SQLiteTable, StatementError, equal_rows, open_table, parse_answer, shown
from empo2.agents.lifelong.tasks import Episode, load, of_table
from empo2.agents.task_file import TaskFileError, read
from empo2.recipe.evaluation.panels import FOLDER, load_panel
from tests.agents.shared_worlds import need_world
from tests.needs import need

UNLIKE_MYSQL = {"6", "81", "213", "270", "295", "302", "392", "400", "449"}
UNLIKE_MARIADB = {"6", "68", "165", "188", "192", "213", "274", "295", "302", "334", "388", "400"}  # 10.11
AGENTS: dict[str, type[LifelongAgent]] = {"db": LifelongAgent, "os": MachineAgent}
OWN = read("lifelong", "own")


def a_table(rows: list[list[Any]], types: str = "INT TEXT") -> SQLiteTable:
    columns = [{"name": name, "type": kind} for name, kind in zip("abc", types.split(), strict=False)]
    return SQLiteTable({"name": "t", "column_info_list": columns, "row_list": rows})


def an_episode(name: str, **changes: Any) -> Episode:
    kind, task = name.split("/")
    return Episode(**{"tasks": "own", "kind": kind, "task": task, "max_steps": 4, **changes})


# Tables


@pytest.mark.parametrize(
    ("statement", "rows"),
    [
        ("SELECT AVG(a) FROM t", [(2.3333,)]),  # 7 / 3
        ("SELECT STDDEV(a) FROM t", [(pytest.approx((14 / 9) ** 0.5),)]),  # of 1, 2 and 4
        ("SELECT a / 2 FROM t WHERE b = 'ANN';", [(0.5,)]),
        ("SELECT 'a/b', a FROM t WHERE a > 3", [("a/b", 4)]),
        ("SELECT COUNT(*) FROM t GROUP BY b ORDER BY b", [(1,), (2,)]),  # ann; Ben and ben
        ("SELECT AVG(b) FROM t WHERE a < 0", [(None,)]),
        ('SELECT IF(a > 3, "much", CONCAT(b, "!")) FROM t', [("ann!",), ("Ben!",), ("much",)]),
        ("SELECT AVG(a) OVER (ORDER BY a ROWS 1 PRECEDING) FROM t", [(1.0,), (1.5,), (3.0,)]),
        ("SELECT VAR_POP(a) FROM t", [(pytest.approx(14 / 9),)]),
        ("SELECT LEFT(b, 2), RIGHT (b, 1), CHAR_LENGTH(b), 'LEFT(' FROM t WHERE a = 1", [("an", "n", 3, "LEFT(")]),
        ("SELECT t.a FROM t LEFT JOIN t AS u ON t.a = u.a WHERE t.b REGEXP '^B'", [(2,), (4,)]),
        ("SELECT DATEDIFF('2024-03-01', '2024-02-01 08:00:00'), CONCAT_WS('-', 1, NULL, 'x')", [(29, "1-x")]),
        ("SELECT DATE_FORMAT('2024-03-01 08:05:06', '%d.%m.%Y %H:%i:%s, %M')", [("01.03.2024 08:05:06, March",)]),
        ("SELECT YEAR('2024-05-06'), MONTH('2024-05-06'), GREATEST(1, 3, 2)", [(2024, 5, 3)]),
    ],
)
def test_results_are_mysqls(statement: str, rows: list[Any]):
    assert a_table([[1, "ann"], [2, "Ben"], [4, "ben"]]).execute(statement) == rows


def test_what_is_written_to_a_whole_column_is_rounded():
    table = a_table([[1, "x"], [2, "y"], [3, "z"]])
    table.execute("UPDATE t SET a = a * 1.5")  # 1.5, 3, 4.5
    assert table.rows() == [(2, "x"), (3, "y"), (5, "z")]


def test_a_renamed_column_is_no_error_of_what_is_written_later():
    table = a_table([[1, "x"]])
    table.execute("ALTER TABLE t RENAME COLUMN a TO n")
    assert table.execute("INSERT INTO t VALUES (2, 'y')") == [] and table.rows() == [(1, "x"), (2, "y")]


def test_a_join_by_mistake_does_not_fill_the_memory():
    table = a_table([[number, "x"] for number in range(100)])
    assert len(table.execute("SELECT * FROM t AS u, t AS v, t AS w")) == 10_000
    assert table.execute("DROP TABLE t") == []


def test_other_files_and_endless_statements_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tables, "_SECONDS", 0.1)
    table = a_table([[1, "x"]])
    for statement, says in (
        (f"ATTACH '{tmp_path}/new' AS other", "not authorized"),
        ("PRAGMA table_info(t)", "not authorized"),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT COUNT(*) FROM n", "interrupted"),
        ("SELECT colour FROM t", "no such column: colour"),
        ("SELECT 1; SELECT 2", "one statement at a time"),
    ):
        with pytest.raises(StatementError, match=says):
            table.execute(statement)
    assert shown(table, "SELEC") == 'Error: near "SELEC": syntax error' and not list(tmp_path.iterdir())
    assert shown(table, "SELECT 'y' FROM t") == "[('y',)]"
    assert shown(table, f"SELECT '{'y' * 3000}'").endswith("y ... (cut)")


@pytest.mark.parametrize(
    ("answer", "rows"),
    [
        ('[["Ann", 3], ["Ben", null]]', [["Ann", 3], ["Ben", None]]),
        (" [('Ann', 3), ('Ben', None)]\n", [["Ann", 3], ["Ben", None]]),
        ("`[[1]]`", [[1]]),
        ('["Ann", 3]', [["Ann", 3]]),
        ("42", [[42]]),
        ("[]", []),
        ('[["Ann", 3]].\nThese are the rows [of all].', [["Ann", 3]]),
        ("[('Ann', 3)]. These are all.\nDone [so far]", [["Ann", 3]]),
        ("** [[1]]**", [[1]]),
        ("42.", [[42]]),
        ("Ann and Ben", None),
        ('{["Ann", 3]}', None),
        ("[" * 10_000, None),
    ],
)
def test_answers_are_json_or_tuples(answer: str, rows: Any):
    assert parse_answer(answer) == rows


def test_rows_are_compared_as_numbers_and_text():
    assert equal_rows([(1, "2.50", None)], [["1", 2.5000001, "NULL"]], ordered=True)
    assert not equal_rows([(1,)], [(1.01,)], ordered=True) and not equal_rows([(1,)], [(1, 2)], ordered=True)
    assert equal_rows([("b", 1), ("a", 2)], [("a", 2), ("b", 1)], ordered=False)
    assert not equal_rows([("b", 1), ("a", 2)], [("a", 2), ("b", 1)], ordered=True)
    assert not equal_rows([], [("a",)], ordered=False)
    assert not equal_rows([(10**400,)], [[1]], ordered=False)
    assert equal_rows([("Nan", 3), ("Infinity", 1)], [["Infinity", 1], ["Nan", 3]], ordered=False)  # names


# Rows and episodes


def test_rows_are_memrls_split_by_number():
    for kind, counts in (("db", [3, 2]), ("os", [2, 2])):
        parts = load(kind)  # pyright: ignore[reportArgumentType]
        assert [len(part) for part in parts] == counts
        assert {row["max_steps"] for row in parts[0]} == {15} and {row["kind"] for row in parts[1]} == {kind}
    assert [row["task"] for row in load(train_tasks=2)[0]] == ["own-1", "own-2"]
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"kind": "kg"}, "kind 'kg' is unknown; nearest: db, os"),
        (
            {"tasks": "no.json"},
            "there is no file no.json of tasks: make it with `python -m empo2.agents.lifelong import",
        ),
        ({"max_steps": 0}, "max_steps 0 must be at least 1"),
        ({"test_tasks": 0}, "test_tasks 0 must be at least 1"),
    ]
    for wrong, says in wrongs:
        with pytest.raises(ValueError) as raised:
            load(**wrong)
        assert str(raised.value).startswith(says)


def test_a_file_that_holds_no_tasks_and_a_task_that_is_not_there_are_named(tmp_path: Path):
    for text in ("{", "[]", '{"world": "other", "tasks": {}}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(TaskFileError, match=r"bad.json is no file of tasks of lifelong: make it with"):
            read("lifelong", str(tmp_path / "bad.json"))
    with pytest.raises(TaskFileError, match="own has no task 'db/99' of lifelong"):
        LifelongAgent.game(an_episode("db/99"))


@pytest.mark.parametrize("name", OWN)
def test_each_task_is_solved_by_its_solution_and_by_nothing_else(name: str, play_agent: Callable[..., dict], server):
    task, kind = OWN[name], name.split("/")[0]
    language = {"db": "sql", "os": "bash"}[kind]
    answer = f"Answer: {json.dumps(task['answers'][0])}" if task.get("answers") else "Answer: done, so I finish."
    reward = play_agent(AGENTS[kind], an_episode(name), [f"So:\n```{language}\n{task['solution']}\n```", answer])
    assert (reward["value"], reward["success"], reward["metrics"]) == (1, True, {"invalid_actions": 0})
    assert reward["message"] == f"{name}: solved after 2 replies"
    first, second = (chat["messages"] for chat in server.chats)
    assert first[1]["content"].startswith(task["instruction"]) and len(second) == 4
    reward = play_agent(AGENTS[kind], an_episode(name), ["Let me see.", "Answer: done, so I finish."])
    assert (reward["value"], reward["metrics"]) == (0, {"invalid_actions": 0.5})
    assert server.chats[-1]["messages"][-1]["content"].startswith("Nothing was run: your reply has neither a block nor")


def test_what_a_statement_or_a_command_gives_is_told(play_agent: Callable[..., dict], server):
    block = "```sql\nSELECT days FROM loans WHERE reader = 'ada' ORDER BY days\n```"
    assert play_agent(LifelongAgent, an_episode("db/own-4", max_steps=1), [block])["value"] == 0
    play_agent(LifelongAgent, an_episode("db/own-4"), [block, 'Final Answer: [["Ada", "5.5"]]'])
    chat = server.chats[-1]["messages"]
    assert chat[1]["content"].endswith("\n\nTable: loans (loan_id INT, reader TEXT, branch TEXT, days INT)")
    assert chat[-1]["content"] == "[(3,), (8,)]"
    blocks = [f"```bash\n{command}\n```" for command in ("ls /opt/inbox", "true", "seq 1000")]
    play_agent(MachineAgent, an_episode("os/own-4"), [*blocks, "Finish"])
    told = [message["content"] for message in server.chats[-1]["messages"][3::2]]
    assert told[:2] == ["a\nb\nc", "(no output; exit code 0)"] and told[2].endswith(" ... (cut)")
    both = "First:\n```bash\ncd /opt/inbox\n```\nThen:\n```bash\nls\n```"
    play_agent(MachineAgent, an_episode("os/own-4"), [both, "Finish"])
    assert server.chats[-1]["messages"][3]["content"] == "a\nb\nc"


@pytest.mark.parametrize("statement", ["DROP TABLE loans", "ALTER TABLE loans RENAME TO u"])
def test_a_player_who_loses_the_table_has_not_solved_the_task(statement: str, play_agent: Callable[..., dict]):
    assert OWN["db/own-3"]["md5"] and OWN["db/own-3"]["table"]["name"] == "loans"
    reward = play_agent(LifelongAgent, an_episode("db/own-3"), [f"```sql\n{statement}\n```", "Answer: done"])
    assert reward["value"] == 0


@pytest.mark.parametrize("command", ["rm -rf /tmp", "rm -rf /usr/bin", "echo \0"])
def test_a_player_who_breaks_the_machine_has_not_solved_the_task(command: str, play_agent: Callable[..., dict], server):
    reward = play_agent(
        MachineAgent, an_episode("os/own-4"), [f"```bash\n{command}\n```", "```bash\nls\n```", "Finish"]
    )
    assert (reward["value"], len(server.chats)) == (0, 3)


def test_a_check_that_takes_too_long_is_no_verdict(monkeypatch: pytest.MonkeyPatch):
    game: Any = MachineAgent.game(an_episode("os/own-4"))
    monkeypatch.setattr(game._machine, "run", lambda *_: (None, ""))
    with pytest.raises(RuntimeError, match=r"os/own-4: its check took longer than 60 s"):
        game.outcome()
    monkeypatch.undo()
    game.close()


def test_order_counts_where_the_statement_has_one(play_agent: Callable[..., dict]):
    right = OWN["db/own-1"]["answers"][0]
    assert [row[0] for row in right] == ["North", "South", "East"]
    for rows, value in ((right, 1), (right[::-1], 0)):
        assert play_agent(LifelongAgent, an_episode("db/own-1"), [f"Answer: {json.dumps(rows)}"])["value"] == value
    fenced = f"Answer:\n```json\n{json.dumps(right)}\n```"
    assert play_agent(LifelongAgent, an_episode("db/own-1"), [fenced])["value"] == 1
    for reply in (
        f"**Final Answer:** {json.dumps(right)}",
        f"**Answer:**\n```json\n{json.dumps(right)}\n```\nDone.",
        f"<think>I have the rows.\nAnswer: to be given as JSON.</think>\nAnswer: {json.dumps(right)}\nThat is all.",
    ):
        assert play_agent(LifelongAgent, an_episode("db/own-1"), [reply])["value"] == 1, reply
    rows = OWN["db/own-4"]["answers"][0][::-1]
    assert play_agent(LifelongAgent, an_episode("db/own-4"), [f"Answer: {json.dumps(rows)}"])["value"] == 1


# Official tasks


def official(kind: str) -> dict[str, Any]:
    name = {"db": "db_bench", "os": "os_interaction"}[kind]
    return json.loads((need_world("lifelongagentbench") / f"{name}_runtime_learning_data.json").read_text())


def test_all_but_nine_of_500_official_statements_have_mysqls_result():
    assert {number for number, task in official("db").items() if of_table(task) is None} == UNLIKE_MYSQL


@pytest.mark.rare
@pytest.mark.timeout(3600)
def test_an_import_keeps_what_its_own_solutions_solve(tmp_path: Path, run_main: Callable[..., tuple]):
    official("os")
    folder = need_world("lifelongagentbench")
    code, out, err = run_main(
        command_line.main, "import", *sorted(folder.glob("*_data.json")), "--output", tmp_path / "lifelong.json"
    )
    assert (code, err) == (0, "") and "988 of 1000 tasks; left out, since" in out
    for kind, counts in (("db", [352, 139]), ("os", [348, 149])):
        parts = load(kind, str(tmp_path / "lifelong.json"))  # pyright: ignore[reportArgumentType]
        assert [len(part) for part in parts] == counts
    code, _, err = run_main(command_line.main, "import", folder / "memrl_split_db.json", "--output", tmp_path / "x")
    assert code == 2 and "memrl_split_db.json is no file of LifelongAgentBench's db or os tasks" in err


@pytest.fixture
def mariadb(tmp_path: Path) -> Iterator[Path]:
    """The option file of a started server."""
    need("pymysql", by="pip install pymysql")
    if not shutil.which("mariadbd"):
        pytest.skip("needs mariadbd: apt install mariadb-server")
    install = [
        "mariadb-install-db",
        "--no-defaults",
        f"--datadir={tmp_path}/data",
        "--auth-root-authentication-method=normal",
    ]
    subprocess.run(install, check=True, capture_output=True)
    socket, options = tmp_path / "socket", tmp_path / "my.cnf"
    options.write_text(f"[client]\nuser=root\nsocket={socket}\n")
    start = [
        "mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={tmp_path}/data",
        f"--socket={socket}",
        "--skip-networking",
    ]
    with subprocess.Popen(start, stderr=subprocess.DEVNULL) as process:
        while not socket.exists():
            assert process.poll() is None
            time.sleep(0.1)
        yield options
        process.terminate()


@pytest.mark.rare
def test_a_real_server_in_place_of_sqlite(mariadb: Path, play_agent: Callable[..., dict]):
    for name in ("db/own-1", "db/own-3"):
        task = OWN[name]
        answer = f"Answer: {json.dumps(task['answers'][0] if task['answers'] else 'done')}"
        replies = [f"```sql\n{task['solution']}\n```", answer]
        assert play_agent(LifelongAgent, an_episode(name), replies, **{SERVER: str(mariadb)})["value"] == 1
    table = open_table(OWN["db/own-1"]["table"], str(mariadb))
    assert shown(table, "SELECT AVG(days) FROM loans") == "[(10.0,)]"
    assert (
        shown(table, "SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name LIKE 'lifelong%'") == "[(1,)]"
    )
    with pytest.raises(StatementError):
        table.execute("SELECT SLEEP(60)")  # longer than a statement may take: the connection is closed
    assert len(table.rows()) == len(OWN["db/own-1"]["table"]["row_list"])
    table.close()
    wrong = {number for number, task in official("db").items() if of_table(task, str(mariadb)) is None}
    assert wrong | {"274"} == UNLIKE_MARIADB  # its LIMIT cuts equal rows, whose order varies


@pytest.mark.parametrize("kind", ["db", "os"])
def test_panels_are_memrls_splits_of_what_is_solved(kind: str):
    for name, part in ((f"lifelong-{kind}-seen", 0), (f"lifelong-{kind}", 1)):
        panel = load_panel(name)
        held_out = set(json.loads((FOLDER.parents[2] / "agents/lifelong/held_out.json").read_text())[kind])
        assert all((row["task"] in held_out) == bool(part) for row in panel.rows)
        assert {row["tasks"] for row in panel.rows} == {"lifelong.json"}
