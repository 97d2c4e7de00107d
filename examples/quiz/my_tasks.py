"""Tasks for EMPO2: put your own here. The fields of a row reach the agent through agent.env."""


def load() -> tuple[list[dict], list[dict]]:
    """Training tasks and validation tasks."""
    tasks = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 10)]
    return tasks[::2], tasks[1::2][:20]
