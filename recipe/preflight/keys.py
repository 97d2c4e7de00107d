"""The gateway's keys that the environment gives."""

import os

from empo2.recipe.errors import ConfigError
from empo2.recipe.protocol import Keys

KEY, ADMIN_KEY = "EMPO2_KEY", "EMPO2_ADMIN_KEY"


def given_keys() -> Keys:
    """Return the gateway's keys that the environment gives, "" where it gives none; a ConfigError if they are equal."""
    keys = Keys(os.environ.get(KEY, ""), os.environ.get(ADMIN_KEY, ""))
    if keys.agent and keys.agent == keys.admin:
        raise ConfigError(f"{ADMIN_KEY} equals {KEY}, which agents get: give another one")
    return keys
