"""``empo2 adapt``."""

EXAMPLES = ""


def adapt() -> None:
    """Adapt."""
