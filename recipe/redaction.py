"""Keep secrets out of what is written, printed or sent: keys, tokens and passwords, found by their names and values."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MASK = "(secret, left out)"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORDS = frozenset(
    {"key", "keys", "apikey", "token", "secret", "secrets", "password", "passwd", "pwd", "credential", "credentials"}
    | {"auth", "authorization", "passphrase", "passcode", "cookie"}
)
_SECRET_ENDS = ("password", "passwd", "secret", "apikey", "accesskey", "sshpass")  # of a word, as in PGPASSWORD
_LAST_WORDS = ("pass", "pat")  # of a name, as in DB_PASS
_HEADERS = re.compile(r"OTEL_EXPORTER_OTLP_(\w+_)?HEADERS")  # authorization=Bearer KEY,...
# Columns of verl's data sets, and a field of tasks.
_NO_SECRETS = frozenset({"prompt_key", "reward_fn_key", "image_key", "video_key", "audio_key", "teacher_key"}) | {
    "answer_key",
    "answerKey",
}
_OF_MODELS_TOKENS = re.compile(r"token_(len|ids?|level|veto)(?![a-z])")  # such as verl's ppo_max_token_len_per_gpu
_FOLDERS = ("PWD", "OLDPWD")  # in the environment these are a shell's folders, not passwords
_PASSWORD_IN_URL = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]*(?=@)")  # in linear time
# Of a command line: `API_KEY=value program --token value`, but no `{NAME}` or `$NAME`.
_GIVEN = re.compile(r"""(?<![\w-])([A-Z][A-Z0-9_]*=|--[a-z][\w-]*[ =])(['"]?)([^\s{($'"][^\s'"]{7,})""")
_AUTHORIZATION = re.compile(r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)\s+)[^\s'\"]{8,}")
_SHORTEST = 8  # characters of a value that is looked for inside other text; "1" would be found everywhere


def is_secret(name: str) -> bool:
    """Return True if a setting or variable of this name holds a secret, as ``HF_TOKEN``, ``apiKey`` or ``password``.

    ``max_tokens`` is none: the words must be singular.
    """
    if name in _NO_SECRETS:
        return False
    words = [word.lower() for word in _WORDS.findall(_OF_MODELS_TOKENS.sub("", name))]
    last = words[-1] if words else ""
    return any(map(_is_secret_word, words)) or last in _LAST_WORDS or bool(_HEADERS.fullmatch(name))


def _is_secret_word(word: str) -> bool:
    return word in _SECRET_WORDS or word.endswith(_SECRET_ENDS)


def redacted(values: Any) -> Any:
    """Return a copy of nested settings, or of a text, without secrets.

    Masked are values under secret names, also of variables and options of a command line, the same values inside other
    text, those of this process's environment variables with secret names, and passwords in URLs. None, empty values and
    fields of a task ("input.x") stay.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _FOLDERS}
    found = {*_secrets_in(values), *_secrets_in(environment)}
    known = sorted((secret for secret in found if len(secret) >= _SHORTEST), key=len, reverse=True)
    return _without_secrets("", values, known)


def _is_masked(name: str, value: Any) -> bool:
    return value not in (None, "") and is_secret(name) and not str(value).startswith("input.")


def _secrets_in(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _secrets_in(each, str(key))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _secrets_in(each, name)
    elif _is_masked(name, value):
        yield str(value)
        if _HEADERS.fullmatch(name):  # of each header the key alone, too
            for header in str(value).split(","):
                yield from unquote(header.partition("=")[2]).split()[-1:]


def _without_secrets(name: str, value: Any, known: Iterable[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_secrets(str(key), each, known) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(name, each, known) for each in value]
    if _is_masked(name, value):
        return MASK
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, MASK)
        value = _AUTHORIZATION.sub(rf"\1{MASK}", _PASSWORD_IN_URL.sub(MASK, value))
        return _GIVEN.sub(_without_its_value, value)
    return value


def _without_its_value(given: re.Match[str]) -> str:
    last = _WORDS.findall(given[1])[-1].lower()  # which tells what it is: no `--token-file`
    return f"{given[1]}{given[2]}{MASK}" if _is_secret_word(last) or last in _LAST_WORDS else given[0]
