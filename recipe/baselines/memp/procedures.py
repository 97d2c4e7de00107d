"""Build a procedure of each episode with its trajectory beside it, and revise those that were followed in vain."""

from empo2.recipe.gateway.episodes.episode import Episode
from empo2.recipe.gateway.episodes.reflector import Reflector, question

AS_PLAYED = " As played: "  # between a procedure and its trajectory


async def tip(reflector: Reflector, episode: Episode, score: float, success: bool) -> str | None:
    """Return the procedure of an episode, or what went wrong, and its trajectory; None if notes were revised instead.

    An episode that failed with notes revises each of these in place, as MemP's update does: the text changes, its
    trajectory and the states by which it is found stay.

    Raises:
        RefusedTip, ValueError, httpx.HTTPError: the policy wrote none.
    """
    services = reflector.services
    notes = {} if success else await services.memory.texts(list(episode.shown))
    for note, text in notes.items():
        procedure, mark, trajectory = text.partition(AS_PLAYED)
        revised = await reflector.ask_for_tip(episode, {"role": "user", "content": _revision(procedure)})
        await services.memory.revise(note, revised + mark + trajectory)
        services.metrics.counts["memp/revised"] += 1
    if notes:
        return None
    procedure = await reflector.ask_for_tip(episode, question(services.settings.reflection, score, success))
    return procedure + AS_PLAYED + reflector.transcript(episode, score, success)


def _revision(procedure: str) -> str:
    return (
        "The episode is over: the task was not completed. The player was shown this procedure:\n\n"
        f"{procedure}\n\nWrite it anew, so that it solves tasks of this kind: three to five general steps, "
        "corrected where the episode shows that it misled. One sentence, with a semicolon between steps, no preamble."
    )
