"""Secrets: what is masked, and that none reaches a logger or a file."""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from empo2.recipe.config import flat, load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.redaction import MASK, is_secret, redacted
from empo2.recipe.trainer.verl_config import build_verl_config

from ..processes import until


def test_names_of_secrets() -> None:
    secrets = ("HF_TOKEN", "WANDB_API_KEY", "agl_key", "apiKey", "key", "db_password", "PWD")
    others = (
        "PGPASSWORD",
        "SSHPASS",
        "DB_PASS",
        "dbpassword",
        "accesskey",
        "SSH_PASSPHRASE",
        "JUDGE_AUTH",
        "GITHUB_PAT",
    )
    for name in (
        *secrets,
        *others,
        "SESSION_COOKIE",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    ):
        assert is_secret(name), name
    for name in (
        "max_tokens",
        "tokenizer",
        "prompt_key",
        "keyboard",
        "pass_rate",
        "author",
        "PATH",
        "SCIENCEWORLD_MAX_TOKENS",
        "answer_key",
        "answerKey",
    ):
        assert not is_secret(name), name
    for name in ("ppo_max_token_len_per_gpu", "stop_token_ids", "log_prob_max_token_len_per_gpu"):
        assert not is_secret(name), name


def test_what_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("SHORT_KEY", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=1,authorization=Basic%20cHVibGljOnNlY3JldA==")
    monkeypatch.setenv("PWD", "/home/me/project")
    values = {
        "folder": "/home/me/project/runs",
        "env": {"OPENAI_API_KEY": "sk-0123456789", "LINE": "play --key sk-0123456789", "TOKEN": "input.token"},
        "list": ["a hf_0123456789 b", {"password": "12"}, "Basic cHVibGljOnNlY3JldA== of x-team=1"],
        "url": "https://me:pass@host/x",
        "line": "MY_API_KEY=tvly-123456 play --api-key 'sk-123456' --token-file a/token.txt --key {MY_KEY_OF}",
        "judge": "PGPASSWORD=hunter2hunter2 ask -H 'Authorization: Bearer sk-abc123456' 'basic understanding'",
        "key": None,
        "max_tokens": 7,
    }
    assert redacted(values) == {
        "folder": "/home/me/project/runs",
        "env": {"OPENAI_API_KEY": MASK, "LINE": f"play --key {MASK}", "TOKEN": "input.token"},
        "list": [f"a {MASK} b", {"password": MASK}, f"Basic {MASK} of x-team=1"],
        "url": f"https://{MASK}@host/x",
        "line": f"MY_API_KEY={MASK} play --api-key '{MASK}' --token-file a/token.txt --key {{MY_KEY_OF}}",
        "judge": f"PGPASSWORD={MASK} ask -H 'Authorization: Bearer {MASK}' 'basic understanding'",
        "key": None,
        "max_tokens": 7,
    }
    masked = [name for name, value in flat(redacted(values)) if MASK in str(value)]
    assert masked == ["env.OPENAI_API_KEY", "env.LINE", "list", "url", "line", "judge"]


def test_a_wrong_setting_is_named_without_its_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, ["agent.API_KEY=[my-secret]", "agent.env={API_KEY: 12345678}"])
    assert "agent.API_KEY=" in str(caught.value) and "agent.env.API_KEY=" in str(caught.value)
    assert "my-secret" not in str(caught.value) and "12345678" not in str(caught.value)
    settings = load_settings(None, ["verl.trainer.api_key=my-secret"])
    with pytest.raises(ConfigError, match=r"verl.trainer.api_key='\(secret") as caught:
        build_verl_config(settings, model_path="m", run_directory=Path(), gateway_url="", gateway_key="")
    assert "my-secret" not in str(caught.value)


@pytest.mark.stack
@pytest.mark.usefixtures("offline_wandb")
def test_no_logger_of_verl_is_given_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb, offline: what ``wandb.init`` is given, and every byte that it writes."""
    import wandb

    from empo2.recipe.trainer.tracking import RunTracking

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    monkeypatch.setattr(sys, "argv", ["empo2", "train", "--key", "key-of-the-gateway"])
    given: list[dict[str, Any]] = []
    init = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: given.append(options["config"]) or init(**options))
    settings = load_settings("cpu", ["agent.env={OPENAI_API_KEY: sk-secret-1, LINE: x hf_of_the_environment}"])
    config = build_verl_config(
        settings, model_path="m", run_directory=tmp_path, gateway_url="u", gateway_key="key-of-the-gateway"
    )
    values: Any = OmegaConf.to_container(config, resolve=True)
    tracking = RunTracking("empo2", "run", default_backend=["wandb"], config=values)
    tracking.log({"a": 1.0}, step=1)
    del tracking
    secrets = ("key-of-the-gateway", "sk-secret-1", "hf_of_the_environment")
    assert given[0]["agentlightning"]["agl_key"] == MASK
    assert given[0]["algorithm"]["adv_estimator"] == "grpo"
    until(lambda: b"adv_estimator" in _all_of(tmp_path))  # a process of wandb's writes it
    written = _all_of(tmp_path)
    for secret in secrets:
        assert secret not in json.dumps(given) and secret.encode() not in written, secret
    assert config.agentlightning.agl_key == "key-of-the-gateway"  # the trainer keeps it


def _all_of(folder: Path) -> bytes:
    """What the files of a folder hold; any may go meanwhile."""
    texts = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            texts += [path.read_bytes()] if path.is_file() else []
    return b"".join(texts)


@pytest.mark.stack
def test_rays_runtime_environment_has_no_key_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray writes it to its logs and shows it in its dashboard."""
    import ray

    from empo2.recipe.trainer.ray_environment import start_ray

    monkeypatch.setenv("EMPO2_KEY", "key-of-the-gateway")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    given: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda **options: given.append(options))
    config = build_verl_config(
        load_settings("cpu"), model_path="m", run_directory=Path(), gateway_url="u", gateway_key="key-of-the-gateway"
    )
    start_ray(config)
    assert "OMP_NUM_THREADS" in str(given)
    assert "key-of-the-gateway" not in str(given) and "hf_of_the_environment" not in str(given)


def test_an_address_of_colons_is_read_in_linear_time() -> None:
    begin = time.process_time()
    redacted({"text": "://" + ":" * 100_000})
    assert time.process_time() - begin < 2
    assert redacted("http://me:a:b@host") == f"http://{MASK}@host"
