"""Which of an agent's calls are trained (``gateway.trained_calls``)."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from empo2.recipe.config import CallRule, imported

# Path relative to /v1, headers (names in lower case), body -> whether the call is trained.
Choice = Callable[[str, Mapping[str, str], dict[str, Any]], bool]


def choice_of(rules: Sequence[CallRule] | str) -> Choice | None:
    """Return the function that tells whether a call is trained; None if all are.

    Args:
        rules: ``module:function``; or rules, one of which must fit; none for all calls.

    Raises:
        ConfigError: the function cannot be imported.
    """
    if isinstance(rules, str):
        return imported(rules, "gateway.trained_calls")
    return (lambda path, headers, body: any(_fits(rule, path, headers, body) for rule in rules)) if rules else None


def _fits(rule: CallRule, path: str, headers: Mapping[str, str], body: dict[str, Any]) -> bool:
    if rule.path is not None and not fnmatchcase(path, rule.path.strip("/")):
        return False
    if rule.model is not None and not fnmatchcase(str(body.get("model", "")), rule.model):
        return False
    if rule.header is not None:
        name, _, value = rule.header.partition(":")
        found = headers.get(name.strip().lower())
        return found is not None and fnmatchcase(found, value.strip() or "*")
    return True
