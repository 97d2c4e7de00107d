"""Lines of the trainer's log that the launcher shows to the user; each begins with a mark."""

STAGES = ("Ray", "verl", "gateway", "policy", "vLLM")
"""What a run loads, in this order; the gateway loads its embedder beside the first two. The launcher sees the first and
the last one itself."""

_LOADING, _NOTE = "empo2: loading ", "empo2: note: "


def say_loading(stage: str) -> None:
    """Print that a stage has begun; "" when nothing is left to load."""
    print(f"{_LOADING}{stage}", flush=True)


def say_note(text: str) -> None:
    """Print one line that the launcher shows to the user."""
    print(f"{_NOTE}{text}", flush=True)


def loading_in(line: str) -> str | None:
    """Return the stage that a line of the log says has begun; None for any other line."""
    return line.removeprefix(_LOADING).strip() if line.startswith(_LOADING) else None


def note_in(line: str) -> str | None:
    """Return what a line of the log has for the user; None for any other line."""
    return line.removeprefix(_NOTE).strip() if line.startswith(_NOTE) else None
