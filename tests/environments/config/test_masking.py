"""No secret can be read from a shown config."""

import pytest
from pydantic import BaseModel, SecretStr

from environments.config.loader import masked


class Inner(BaseModel):
    api_key: SecretStr
    base_url: str = "https://user:hunter2@host/v1"
    env: dict[str, str] = {}


class Outer(BaseModel):
    servers: list[Inner]
    nomad_token: str = ""
    max_tokens: int = 5
    tokenizer_name: str = "x"


def test_secrets_are_masked_wherever_they_stand():
    config = Outer(
        servers=[Inner(api_key=SecretStr("hunter2"), env={"HF_TOKEN": "hunter2", "PATH": "/bin"})],
        nomad_token="hunter2",
    )
    shown = masked(config)
    assert "hunter2" not in repr(shown)
    assert shown["servers"][0]["base_url"] == "https://***@host/v1"
    assert shown["servers"][0]["env"]["PATH"] == "/bin"


def test_what_only_sounds_like_a_secret_is_shown():
    shown = masked(Outer(servers=[]))
    assert shown["max_tokens"] == 5
    assert shown["tokenizer_name"] == "x"


@pytest.mark.parametrize("value", ["", None])
def test_an_empty_secret_is_shown_as_empty(value):
    assert masked({"api_key": value})["api_key"] == value
