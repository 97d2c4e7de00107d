"""The learning experiment: counts, statistics, report and probe are those computed by hand."""

import itertools
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import deep_report as deep
import fine_tune
import learning
import learning_notes as notes
import learning_plan as plans
import learning_report as report
import learning_statistics as statistics
import numpy as np
import probe
import pytest
import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from empo2.agents.houses.house import House
from empo2.memory import MemoryStore
from empo2.memory.browse import stored_tips
from empo2.memory.file import reading
from empo2.recipe.config import lay_over
from empo2.recipe.files.models import SMOLLM2, resolve_model
from empo2.recipe.files.tasks import load_tasks
from empo2.recipe.rollout_log import write_rollouts
from empo2.recipe.tip_block import render_tips
from empo2.small_model.rows import Message
from empo2.small_model.train import encode, reply_loss

from .memory.stores import add, play

pytestmark = pytest.mark.slow

HOUSE = House("hall", "den", {"hall": {"east": "study"}, "study": {"west": "hall", "north": "den"}, "den": {}})
TRUE = "Coin in the den: hall move east, study move north, den take coin."
FALSE = "Coin in the den: hall move west, study move north, den take coin."
PLAN = plans.read_plan()


def keep_run(results: Path, name: str, metrics: list[dict[str, float]], **facts: Any) -> None:
    rows = ({"step": step, "cpu_seconds": 60 * step} | row for step, row in enumerate(metrics))
    (results / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (results / f"{name}.json").write_text(json.dumps({"rate": 2e-5, "validations": {}} | facts))


def test_episodes_are_counted_by_what_their_notes_said(tmp_path: Path):
    file, scope = tmp_path / "memory.sqlite", '{"level": "hard", "seed": 7}'
    store = MemoryStore(file, embedder="none", dimension=2)
    for number, text in enumerate((TRUE, FALSE, "No coin as far as the hall: hall no coin.", "Coin in the moon.")):
        add(store, f"writer {number}", np.array([1.0, 0.0]), scope=scope, tip=text)
    # Eight episodes: notes 1 (true), 1 and 2, 2, 3, 4 (false), none, 1 and 3, 1.
    for number, (shown, found) in enumerate(
        [((1,), 1), ((1, 2), 0), ((2,), 1), ((3,), 0), ((4,), 0), ((), 1), ((1, 3), 1), ((1,), 0)]
    ):
        play(store, f"player {number}", shown, scope=scope, score=100.0 * found, success=bool(found))
    store.close()
    assert notes.true_notes(file, {7: HOUSE}) == [2, 4]  # "no coin as far as the hall" is true, too
    assert notes.outcomes_by_notes(file, {7: HOUSE}) == {
        "the coin, true": [2, 3],
        "the coin, true and false": [0, 1],
        "the coin, false": [1, 2],
        "no coin": [1, 2],
    }


def tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    layers: Any = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=49152, initializer_range=0.4, **layers)).eval()


def test_the_numbers_of_a_probe():
    """A forward pass for each action alone, and sums over the vocabulary in float64."""
    walk = probe.walk(HOUSE, probe.true_note(HOUSE), AutoTokenizer.from_pretrained(resolve_model(SMOLLM2)))
    start, model = tiny(0), tiny(1)
    actions, entropies, kls = [], [], []
    for places in walk.places:
        ids = torch.tensor([walk.ids[: places.stop]])
        with torch.no_grad():
            both = [each(ids).logits[0].double().softmax(-1).numpy() for each in (model, start)]
        actions.append(np.prod([both[0][place - 1, walk.ids[place]] for place in places]))
        for p, q in ([each[place - 1] for each in both] for place in places):
            entropies.append(-(p * np.log(p)).sum())
            kls.append((p * np.log(p / q)).sum())
    assert len(actions) == 3 and np.mean(kls) > 0.1
    means = {"action": np.mean(actions), "entropy": np.mean(entropies), "start_kl": np.mean(kls)}
    found = probe.probe(model, [walk], [probe.log_probs(start, walk)])
    assert found == pytest.approx(means | {"way": np.prod(actions)}, rel=1e-4, abs=1e-6)  # rounded to six digits


def test_the_start_is_fine_tuned_on_successes_without_their_notes(tmp_path: Path):
    system, room = {"role": "system", "content": "Find the coin."}, {"role": "user", "content": "You are in the hall."}
    moves = [{"role": "assistant", "content": words} for words in ("move east", "take coin")]
    noted = room | {"content": f"{render_tips([TRUE])}\n\n{room['content']}"}
    den = {"role": "user", "content": "You are in the den."}
    rows = []
    for rollout, phase, value in (("a", "training", 100.0), ("b", "training", 0.0), ("c", "validation", 100.0)):
        same = {"rollout": rollout, "step": 1, "phase": phase, "return": value}
        rows.append(same | {"call": 0, "messages": [system, noted], "reply": moves[0]})
        rows.append(same | {"call": 1, "messages": [moves[0], den], "reply": moves[1]})
    for phase in ("training", "validation"):
        write_rollouts(tmp_path / "rollouts", [row for row in rows if row["phase"] == phase], "all")
    (chat,) = fine_tune.successes(tmp_path, 100.0)
    said = [system, room, moves[0], den, moves[1]]
    for number, steps in ((9, (0, 0, 1)), (10, (0, 1))):  # step 0 counts as in the tenth phase, step 1 was played again
        folder = tmp_path / f"set-aside-{number}"
        folder.mkdir()
        for rollout, step in enumerate(steps):
            write_rollouts(
                folder / "rollouts", [row | {"step": step, "rollout": f"{number} {rollout}"} for row in rows[:2]], "all"
            )
    assert fine_tune.successes(tmp_path, 100.0) == [chat, chat]
    assert chat == tuple(Message(each["role"], each["content"], each["role"] == "assistant") for each in said)

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(SMOLLM2))
    tiny(0).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    losses = []
    for updates in (0, 20):  # 20 epochs of one batch
        fine_tune.fine_tune(
            tmp_path / "start", [chat], tmp_path / "end", rate=1e-2, epochs=0, updates=updates, batch=2, seed=0
        )
        model = LlamaForCausalLM.from_pretrained(tmp_path / "end", dtype=torch.float32)
        row = encode(chat, tokenizer)
        assert tokenizer.decode([row.ids[place] for place in row.learned]) == "move east<|im_end|>take coin<|im_end|>"
        with torch.no_grad():
            losses.append(reply_loss(model, row).item())
    assert losses[1] < 0.5 * losses[0]


def test_chats_that_are_alike_count_as_often_as_they_were_played(tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(SMOLLM2))
    tiny(0).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    moved, taken = (
        (Message("user", "You are in the hall.", False), Message("assistant", words, True))
        for words in ("move east", "take the coin now")
    )
    chats = [moved, taken, moved, moved]
    fine_tune.fine_tune(tmp_path / "start", chats, tmp_path / "end", rate=1e-3, epochs=1, updates=4, batch=4, seed=0)
    found = LlamaForCausalLM.from_pretrained(tmp_path / "end", dtype=torch.float32)

    plain = LlamaForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    rows = [encode(chat, tokenizer) for chat in chats]
    for _ in range(4):
        loss = torch.stack([reply_loss(plain, row) for row in rows]).sum() / sum(sum(row.weights) for row in rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(found.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other.to(torch.bfloat16).float(), rtol=0.01, atol=2e-4)


def test_deep_houses_are_planned_in_their_order(tmp_path: Path):
    plan = plans.read_plan("deep")
    made = plans.development(plan, plan["arms"], tmp_path)
    assert len(made) == 2 + 1 + 3 * 5  # two frozen, one with one rate, and five arms with three
    (tuned,) = [job for job in made if job.name == "dev-tuned-memory-2e-5-0"]
    assert isinstance(tuned, plans.FineTuning) and tuned.of == made[1] and made[1].name == "dev-frozen-memory-0"
    with pytest.raises(SystemExit, match="lacks dev-frozen-0, dev-frozen-memory-0, dev-internalise-1e-5-0"):
        plans.chosen(plan, tmp_path, plans.needed(plan))
    listed = [*plans.all_jobs(plan, tmp_path, partial(plans.provisional, plan, tmp_path))]
    places = {"deleted": None, "adaptation": "meta"}  # evaluations stand with what they are of
    stages = [places.get(job.stage, job.stage) for job in listed]
    order = [stage for stage, _ in itertools.groupby(filter(None, stages))]
    # What the claim needs comes first.
    assert order == [
        "development",
        "claim",
        "passes",
        "replay",
        "holding",
        "imitation",
        "meta",
        "development",
        "described",
    ]
    first = itertools.takewhile(lambda job: job.stage == "development", listed)
    assert {job.like for job in first if not isinstance(job, plans.Evaluation)} == plans.needed(plan)
    assert len({job.name for job in listed}) == len(listed)
    for job in made:  # the second rate is the best one of all
        if isinstance(job, plans.FineTuning):
            hits = 0 if job.like == "tuned" else 4 if job.rate == 2e-5 else 2
            parts = {"no notes": {"1": [0, 8], "2": [hits, 8]}}
            plans.file_of(job, tmp_path).write_text(json.dumps({"parts": parts}))
        else:
            keep_run(tmp_path, job.name, [{plans.SCORE: 0.5 if job.rate == 2e-5 else 0.25}])
    choice = plans.chosen(plan, tmp_path, plan["arms"])
    assert choice["frozen"] == ("frozen", plans.FROZEN) and choice["tuned-memory"] == ("tuned-memory", 2e-5)
    assert choice["tuned"] == ("tuned", 4e-5)  # no success at any rate: the largest
    jobs = [job for job in plans.all_jobs(plan, tmp_path, lambda _: choice) if job.stage != "development"]
    first = [job.name for job in jobs if job.seed == 1]
    assert first[:4] == ["grpo-1", "internalise-1", "internalise-1.deleted", "frozen-1"]
    assert [job.name for job in jobs if job.stage == "claim"][-2:] == ["frozen-memory-10", "tuned-memory-10"]
    kinds = ("write", "off", "other", "own")
    own = [f"meta-grpo-1.{kind}" for kind in (*kinds, "of-start", "by-start")]
    meta = [job.name for job in jobs if job.stage in ("adaptation", "meta")]
    assert meta[:11] == [*(f"warm-start.{kind}" for kind in kinds), "meta-grpo-1", *own]  # the start's notes are read
    (stream,) = [job for job in jobs if job.name == "meta-internalise-3" and isinstance(job, plans.Training)]
    seeds = [row["seed"] for row in load_tasks(stream.phases[-1].settings).train]
    assert len(seeds) == 48 * 2 and [len({*seeds[n : n + 12]}) for n in range(0, 96, 12)] == [2] * 8
    blocks = [job.phases[-1].settings.tasks.args["block"] for job in jobs if isinstance(job, plans.Training)]
    assert sorted({*blocks}) == [*range(1, 11)]


def test_jobs_that_cannot_be_made_are_told_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    plan = plans.read_plan("deep")
    of = learning.Experiment(plan, tmp_path / "kept", tmp_path / "runs")
    tuned, _ = plans.development(plan, ["tuned-memory"], of.runs)[:2]
    own, by_start = (plans.Evaluation("adaptation", kind, "meta-grpo-1", 1) for kind in ("own", "by-start"))
    done = plans.Evaluation("adaptation", "off", plans.WARM, 1)
    monkeypatch.setattr(learning.Experiment, "jobs", lambda _: [tuned, own, by_start, done])
    monkeypatch.setattr(learning, "play", lambda job, *_, **__: print(f"plays {job.name}"))
    with pytest.raises(SystemExit, match=f"failed: {tuned.name}, meta-grpo-1.own, meta-grpo-1.by-start$"):
        learning.make(of, lambda _: True, learning.Clock(None))
    said = capsys.readouterr().out
    assert "the rollouts of dev-frozen-memory-0 are not here; remove dev-frozen-memory-0.jsonl, and they" in said
    assert "the weights of meta-grpo-1 are not here; remove meta-grpo-1.jsonl, and they are made again" in said
    assert "the notes of meta-grpo-1.write are not here; remove meta-grpo-1.write.json, and they" in said
    assert said.endswith("plays warm-start.off\n")


def test_another_houses_notes_are_those_of_the_one_before(tmp_path: Path):
    store = MemoryStore(tmp_path / "memory.sqlite", embedder="none", dimension=2)
    for scope in ("a", "b", "c"):
        add(store, f"episode {scope}", np.array([1.0, 0.0]), scope=scope, tip=f"of {scope}")
    store.close()
    for _ in range(2):  # the second time after an interruption
        learning.refile(tmp_path / "memory.sqlite", tmp_path / "other.sqlite", ["a", "b", "c"])
    with reading(tmp_path / "other.sqlite") as db:
        found = {tip.scope: tip.text for tip in stored_tips(db, order="newest")}
    assert found == {"a": "of c", "b": "of a", "c": "of b"}


def test_the_ten_runs_of_the_demo_have_its_settings():
    demo, sweep = (
        yaml.safe_load((plans.ROOT / file).read_text()) for file in ("agents/houses/demo.yaml", "experiments/demo.yaml")
    )
    assert demo["algorithm"].pop("seed") == 1 and sweep == {"seeds": 10, "settings": demo, "arms": {"demo": {}}}


def test_the_clock_goes_on_where_an_interrupted_training_left_it(tmp_path: Path):
    file, own = tmp_path / "a-1.cpu.jsonl", os.getpid()
    for step in (1, 2):
        counter = learning.CpuSeconds(file)
        counter.look(own, None)
        counter.look(own, step)
    first, second = map(json.loads, file.read_text().splitlines())
    assert [first["step"], second["step"]] == [1, 2]
    assert second["cpu_seconds"] == pytest.approx(2 * first["cpu_seconds"], abs=3) and first["cpu_seconds"] > 0


def test_the_exact_test_counts_all_signs():
    assert statistics.p_of_pairs([1, 2, 3, 4, 5, 6]) == 2 / 64
    assert statistics.p_of_pairs([1, 2, 3, 4, 5]) == 2 / 32 and statistics.p_of_pairs([37.5]) == 1
    differences = [12.5, -3.0, 8.0, 1.5, 20.0, -6.0]
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
            for signs in itertools.product((1, -1), repeat=6)]  # fmt: skip
    assert statistics.p_of_pairs(differences) == sum(each >= abs(sum(differences)) - 1e-9 for each in sums) / 64


def test_the_report_is_made_from_what_there_is(tmp_path: Path):
    docs, results = tmp_path / "docs", tmp_path
    docs.mkdir()
    page, details = docs / "learning.md", results / "README.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_report(PLAN, results, docs)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"{report.END}\nafter\n") and "old" not in text
    text += details.read_text()
    assert "- claim: 0 of 24" in text and text.count("*Not measured yet.*") == 6 and "| arm |" not in text

    # Two seeds, two houses of 8 episodes each at the last validations.
    whole = {"7": [8, 8], "12": [8, 8]}
    told = {"the coin, true": [6, 8], "the coin, true and false": [0, 0], "the coin, false": [1, 4], "no coin": [0, 4]}
    for arm, hits in (("empo2", [(8, 4), (6, 2)]), ("bonus", [(2, 2), (2, 0)])):
        for seed, (one, two) in enumerate(hits, 1):
            part = {"7": [one, 8], "12": [two, 8]}
            at = {str(step): {"train, no notes": part, "train, notes": whole} for step in (4, 5, 6)}
            step = {report.FLAT: 0.5, "empo2/memory_fraction": 0.25}
            rows = [{plans.SCORE: (one + two) / 16 * number / 6} | step for number in range(7)]
            facts = {"validations": {"0": {}} | at} | ({"notes": told} if arm == "empo2" else {})
            keep_run(results, f"{arm}-{seed}", rows, **facts)
    for arm, hits in (("empo2", 6), ("on-policy", 2)):
        parts = {"memory off": {"7": [hits, 8], "12": [hits, 8]}}
        (results / f"{arm}-1.deleted.json").write_text(json.dumps({"parts": parts}))
    adapted = {"warm-start.write": (0, 2, 2, 3), "empo2-1.write": (0, 4, 6, 8), "empo2-1.off": (1, 1, 1, 2)}
    for name, ends in adapted.items():
        parts = {f"seed 0, trial {n}, tasks": {"7": [end, 8], "12": [end, 8]} for n, end in enumerate(ends)}
        (results / f"{name}.json").write_text(json.dumps({"parts": parts}))
    unseen = {"1": {"unseen, no notes": {"3": [1, 2], "4": [1, 2]}, "unseen, notes": {"3": [2, 2], "4": [2, 2]}}}
    keep_run(results, "shared-64-1", [{report.UNSEEN_CURVE: 0.5}], validations=unseen)
    keep_run(results, "grpo-64-1", [{report.UNSEEN_CURVE: 0.0}, {report.UNSEEN_CURVE: 0.5}], validations=unseen)
    report.write_report(lay_over(PLAN, {"stages": {"claim": {"tested": 1}, "deleted": {"seeds": [1]}}}), results, docs)
    text = page.read_text() + details.read_text()
    assert "- claim: 4 of 24" in text
    assert "*GRPO, 64 houses: 50 % (50 to 50), from 0 % at the start.*" in text
    assert "one memory for all: unseen houses | 1 | 2e-05 | 100 % (100 to 100) | 50 % (50 to 50) | - |" in text
    # (8 + 4 + 6 + 2) / 32 = 62 %. A draw of a seed and of two of its houses has 16, 12, 8 or 4 of 16 with 1/8, 3/8, 3/8
    # and 1/8; so two seeds have 32 of 32 with 1/64, less than 0.025, and 28 or more with 7/64.
    (arm,) = [line for line in text.splitlines() if line.startswith("| EMPO² (best form) | 2 | 2e-05 |")]
    told = "75 % (75 to 75), 1 of 2 seeds"  # whose memory was deleted
    assert arm == f"| EMPO² (best form) | 2 | 2e-05 | 100 % (100 to 100) | 62 % (38 to 88) | {told} | 6 |"
    # By house 6/8 and 2/8 more, 4/8 and 2/8; a seed 50 and 37.5 points. Twice 6/8 in both seeds has 1/64 again, 2.5 of
    # 4 or more 7/64; 2 of 2 in the first seed alone 1/4. Two pairs cannot reach less than 0.5, one less than 1.
    assert "seed by seed +50, +38; mean of 1 seeds +50 points (+25 to +75), p = 1.0000, at best 1.0000; " in text
    assert "mean of 2 seeds +44 points (+25 to +62), p = 0.5000, at best 0.5000.*" in text
    assert "Difference +50 points (+50 to +50), 1 seeds" in text
    gain = "gain +100 points (+100 to +100); more than without memory by +88 points (+88 to +88)"
    assert f"EMPO²: {gain}; in the fourth trial +62 points (+62 to +62) against the warm start" in text
    # Bonus ends at (2 + 2 + 2 + 0) / 32 = 18.75 %, in step 6; EMPO²'s mean is 10.4 * step: above it from step 2 on.
    assert "19 %: EMPO² at step 2, 2 CPU minutes; GRPO + 1/n at step 6, 6 CPU minutes" in text
    assert "| EMPO² (best form) | 75 % of 16 | - | 25 % of 8 | 0 % of 8 |" in text
    cells = " | ".join(f"{share} % ({share} to {share})" for share in (0, 50, 75, 100))
    assert f"| EMPO² (best form): own notes | 1 | {cells} |" in text
    assert [line for line in text.splitlines() if line.startswith("| EMPO² (best form) | 50% | 25% | - |")]
    for picture in report.PICTURES.values():
        assert f"({picture})" in text and (docs / picture).read_bytes().startswith(b"\x89PNG")


def test_the_report_takes_results_apart(tmp_path: Path):
    """By chance, by finding and reading, by kind of row, and against each arm."""
    docs, results = tmp_path / "docs", tmp_path
    docs.mkdir()
    (docs / "learning.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    # Each of four houses is found by 1 - 0.98^48 = 0.621 and 1 - 0.98^96 = 0.856: 2.5 and 3.4 of four.
    (results / report.START).write_text(json.dumps({"1": {"7": 0.02, "12": 0.02}, "2": {"7": 0.02, "12": 0.02}}))
    for arm, hits in (("empo2", 8), ("bonus", 4), ("grpo", 6)):
        at = {step: {"train, no notes": {"7": [hits, 8]}, "train, notes": {"7": [8, 8]}} for step in ("1", "2", "3")}
        rows = [{plans.SCORE: 0.5, report.FLAT: 0.5} | {f"empo2/{kind}/old_kl": gap for kind, gap in gaps.items()}
                for gaps in ({"off_policy": 0.1, "without_tips": 0.002}, {"off_policy": 0.3})]  # fmt: skip
        keep_run(results, f"{arm}-1", rows, validations=at)
    for arm, hits in (("empo2", 6), ("paper", 3), ("on-policy", 2)):
        (results / f"{arm}-1.deleted.json").write_text(json.dumps({"parts": {"memory off": {"7": [hits, 8]}}}))
    # House 7 is found in trial 3, house 12 in trial 4 alone; without memory each trial finds one of them.
    for kind, trials in (("write", [(0, 0), (0, 0), (2, 0), (4, 8)]), ("off", [(1, 0), (1, 0), (0, 1), (0, 1)])):
        parts = {f"seed 0, trial {n}, tasks": {"7": [a, 8], "12": [b, 8]} for n, (a, b) in enumerate(trials)}
        (results / f"held-1.{kind}.json").write_text(json.dumps({"parts": parts}))
    report.write_report(lay_over(PLAN, {"stages": {"deleted": {"seeds": [1]}}}), results, docs)
    text = (docs / "learning.md").read_text() + (results / "README.md").read_text()
    assert "in 2 % of its episodes (lowest 2 %). Of the coins of 4 houses it would find 2.5 in 48 and 3.4 in 96" in text
    assert "*Against GRPO + 1/n seed by seed +50; mean of 1 seeds +50 points" in text
    assert "Against GRPO seed by seed +25; mean of 1 seeds +25 points" in text
    assert "with and without off-policy steps +12 points" in text  # 3/8 - 2/8
    (row,) = [line for line in text.splitlines() if line.startswith("| EMPO² (best form), reading held: own notes")]
    assert row.endswith("| 75 % (50 to 100) | 50 % | 50 % | 6 % (0 to 12) | - | 2 |")
    assert "| EMPO² (best form) | 50% | - | - | - | - | 0.200 | - | 0.0020 |" in text


def test_the_report_of_deep_houses(tmp_path: Path):
    """Three seeds of two houses; EMPO² knows both, GRPO none, what was fine-tuned one of them."""
    page, plan = (
        tmp_path / "learning.md",
        lay_over(plans.read_plan("deep"), {"stages": {"claim": {"seeds": [1, 2, 3]}}}),
    )
    page.write_text(f"{report.BEGIN}\nother\n{report.END}\nbetween\n{deep.BEGIN}\nold\n{report.END}\nafter\n")
    deep.write_deep_report(plan, tmp_path, tmp_path)
    text = page.read_text()
    assert text.startswith(f"{report.BEGIN}\nother\n{report.END}\nbetween\n{deep.BEGIN}\n\n{report.END}")
    assert "Kept of what was planned" in (tmp_path / "README.md").read_text()
    assert text.endswith(f"{report.END}\nafter\n") and not any(words in text for words in ("old", "| arm |", "Holm"))

    told = {"notes_true": [6, 8], "notes": {}}
    firsts = {"internalise": {"7": 3, "12": 96}, "grpo": {}, "frozen": {"7": 50}, "frozen-memory": {"7": 9, "12": 11}}
    for arm, found in firsts.items():
        hits = 8 if arm == "internalise" else 0
        for seed in (1, 2, 3):
            part = {"7": [hits, 8], "12": [hits, 8]}
            at = {str(step): {"train, no notes": part, "train, notes": part} for step in (16, 20, 24)}
            rows = [{plans.SCORE: value, report.NOTES_CURVE: value} for value in (0.4, 0.5 if hits else 0.4, hits / 8)]
            keep_run(tmp_path, f"{arm}-{seed}", rows, validations=at, found=found, **(told if hits else {}))
    for arm, hits in (("tuned", 8), ("tuned-memory", 4)):
        for seed in (1, 2, 3):
            parts = {"memory off": {"7": [hits, 8], "12": [0, 8]}}
            counted = {"cpu_seconds": 60 * seed} if seed > 1 and arm == "tuned" else {}  # once it was not counted
            (tmp_path / f"{arm}-{seed}.json").write_text(json.dumps({"parts": parts} | counted))
    parts = {"memory off": {"7": [4, 8], "12": [4, 8]}}
    (tmp_path / "internalise-1.deleted.json").write_text(json.dumps({"parts": parts}))
    for name, ends in (("warm-start.write", (0, 4)), ("meta-grpo-1.write", (0, 8)), ("meta-grpo-1.of-start", (2,))):
        parts = {f"seed 0, trial {n}, tasks": {"160": [end, 8]} for n, end in enumerate(ends)}
        (tmp_path / f"{name}.json").write_text(json.dumps({"parts": parts}))
    keep_run(tmp_path, "meta-grpo-1", [{plans.SCORE: 0.0}], validations={}, found={"3": 5, "9": 6})
    deep.write_deep_report(plan, tmp_path, tmp_path)
    text = page.read_text()
    cells = "0 % (0 to 0) | 100 % (100 to 100) | 0 % | - | - | - | - | 25 % (25 to 25) | - | - |"
    details = (tmp_path / "README.md").read_text()
    assert f"| GRPO: own notes | 1 | {cells}" in details
    assert "| the warm start: own notes | 1 | 0 % (0 to 0) | 50 %" in details
    # Three pairs of one sign have p = 2/8 each; Holm's correction for two tests doubles the smaller one, and the other
    # cannot have less. Of six houses drawn none is of one of two kinds with 1/64, at most one with 7/64.
    assert "against GRPO: +100 points (+100 to +100), seed by seed +100, +100, +100; p = 0.5000 by Holm" in text
    assert "fine-tuned on its successes: +50 points (+17 to +83), seed by seed +50, +50, +50; p = 0.5000 by" in text
    assert "with memory, fine-tuned on its successes: +75 points (+58 to +92), seed by seed +75, +75, +75\n" in text
    assert "from GRPO; by +50 points from frozen start, fine-tuned on its successes; by +75 points from" in text
    assert "In the last trial, against the warm start: GRPO +50 points (+50 to +50). Houses" in details
    assert "Houses found in training: GRPO 2 of 16." in details
    cells = "100 % (100 to 100) | 100 % (100 to 100) | 50 % (50 to 50), 1 of 3 seeds | 6 of 6 |"
    assert f"| EMPO² (internalise, one epoch) | 3 | {cells} 75 % of 24 | 1 (3 of 3) | 2 |" in text
    assert "| GRPO | 3 | - | 0 % (0 to 0) | - | 0 of 6 | - | never | 2 |" in text
    # Fine-tuning took 2.5 minutes more than the two of its episodes, a mean over the seeds that counted them.
    assert "| frozen start, fine-tuned on its successes | 3 | - | 50 % (17 to 83) | - | 3 of 6 | - | - | 4 |" in text
    assert (tmp_path / deep.PICTURE).read_bytes().startswith(b"\x89PNG")
    curves = deep.finding(deep.Kept(plan, tmp_path))["EMPO² (internalise, one epoch)"]  # of four houses a seed
    assert [curves[0][1][n] for n in (0, 2, 3, 95, 96)] == [0, 0, 0.25, 0.25, 0.5]


def test_holms_correction():
    assert deep.holm({"a": 0.01, "b": 0.04}) == {"a": 0.02, "b": 0.04}
    assert deep.holm({"a": 0.03, "b": 0.02}) == {"b": 0.04, "a": 0.04} and deep.holm({"a": 0.9, "b": 0.8})["a"] == 1


def test_the_first_success_of_each_house(tmp_path: Path):
    played = {1: [(7, 100.0, "broken"), (7, 0.0, None), (8, 0.0, None)], 2: [(7, 100.0, None), (9, 100.0, None)]}
    for step, rollouts in played.items():
        rows = [
            {"rollout": f"{step} {number}", "step": step, "phase": "training", "call": 0, "messages": [], "reply": {}}
            | {"task": {"seed": house}, "return": value, "dropped": dropped}
            for number, (house, value, dropped) in enumerate(rollouts)
        ]
        write_rollouts(tmp_path / "rollouts", rows, "all")
    assert learning.first_successes(tmp_path) == {"7": 3, "9": 1}
