"""MemP's loop: procedures are built with their trajectories, and revised where they fail."""

from pathlib import Path

from empo2.recipe.baselines.memp.procedures import AS_PLAYED

from .harness import BLOCK, ROOMS, in_reflection, running_gateway

PLAYED = " Observation: a dark room with a lamp Action: go 0 Observation: the lamp is lit Action: go 1"


async def test_build_retrieve_and_update(tmp_path: Path, empty_stores: None) -> None:
    """A success leaves a procedure; a failure with it changes its text, and leaves no other note."""
    changes = ["reflection.form=procedure", "memory.searched=first-turn", "memory.min_similarity=-1"]
    settings = ["reflection.max_words=400", "memory.episode_tokens=900", "algorithm.success_return=100"]
    async with running_gateway(tmp_path, *changes, *settings) as gateway:

        async def play(tip: str, score: float, mode: str = "memory") -> dict[str, float]:
            gateway.tip = tip
            rollout = await gateway.create(mode)
            await gateway.play(rollout, ROOMS)
            return await gateway.ended(rollout, score)

        built = await play("Take the lamp; light it.", 100.0, mode="no-memory")
        ((first,),) = await gateway.query("SELECT text FROM tips")
        states = await gateway.query("SELECT state, action FROM entries")
        assert first.startswith(f"Take the lamp; light it.{AS_PLAYED}The task was completed, score 100.{PLAYED}")
        revised = await play("Open the door; take the lamp.", 0.0)
        shown, asked = gateway.model.requests()[-2].prompt, gateway.reflections()[-1].prompt
        assert f"{BLOCK} of this task (each may be wrong):\n- {first}\n" in shown
        assert "was shown this procedure:\n\nTake the lamp; light it.\n\nWrite it anew" in asked
        assert "As played" not in asked.rpartition("The episode is over")[2]
        ((second,),) = await gateway.query("SELECT text FROM tips")
        assert second == "Open the door; take the lamp." + first.removeprefix("Take the lamp; light it.")
        assert await gateway.query("SELECT state, action FROM entries") == states
        kept = await play("Open the door; light the lamp.", 100.0)  # a success with a note leaves its own
        assert await gateway.query("SELECT count(*) FROM tips") == [(2,)]
        gateway.model.fault = in_reflection(500)
        failed = await play("Look.", 0.0)
        assert (await gateway.query("SELECT text FROM tips ORDER BY id"))[0] == (second,)
    names = ("tips_written", "memp/revised", "reflections_failed")
    counts = [[each.get(f"empo2/{name}", 0) for name in names] for each in (built, revised, kept, failed)]
    assert counts == [[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]
