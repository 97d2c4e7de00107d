"""Settings in an OmegaConf configuration as they are: ``${`` in a command line or a prompt is no interpolation."""

from typing import Any

from omegaconf import DictConfig


class _Literal(str):
    """A string that OmegaConf (2.3) takes for no interpolation, as it looks for ``${`` in it.

    Escapes do not help: ``OmegaConf.resolve`` puts the unescaped string back, which is then interpolated after all.
    """

    def __contains__(self, part: str) -> bool:
        return part != "${" and super().__contains__(part)


def literally(section: dict[str, Any]) -> DictConfig:
    """Return a nested dict as a section whose strings are never interpolated, neither on access nor when resolved."""
    return DictConfig(_marked(section), flags={"allow_objects": True})


def _marked(value: Any) -> Any:
    match value:
        case str() if "${" in value:
            return _Literal(value)
        case dict():
            return {key: _marked(each) for key, each in value.items()}
        case list():
            return [_marked(each) for each in value]
    return value
