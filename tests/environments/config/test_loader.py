"""YAML + dotted flags -> typed model, strictly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr

from environments.config.loader import load_config
from environments.config.yaml_file import read_yaml
from environments.errors import ConfigError


class Server(BaseModel):
    base_url: str = "http://127.0.0.1:8000"
    api_key: SecretStr = SecretStr("none")
    weight: float = 1.0


class Env(BaseModel):
    group_size: int = Field(default=4, gt=0, le=64)
    temperature: float = 1.0
    toolsets: list[str] = []
    extra_body: dict[str, int] = {}
    name: str | None = None
    timeout_s: float = -1


class Settings(BaseModel):
    env: Env = Env()
    servers: list[Server] = []
    by_name: dict[str, Server] = {}
    testing: bool = False


@pytest.fixture
def write(tmp_path):
    def _write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return _write


def message_of(model, source, flags=()):
    with pytest.raises(ConfigError) as caught:
        load_config(model, source, flags)
    return str(caught.value)


def test_defaults_without_file_or_flags():
    assert load_config(Settings) == Settings()


def test_file_values_and_flags_win_in_that_order(write):
    path = write("env:\n  group_size: 8\n  temperature: 0.5\n")
    settings = load_config(Settings, path, ["--env.group_size", "16"])
    assert settings.env.group_size == 16
    assert settings.env.temperature == 0.5


def test_unknown_key_names_file_line_and_nearest(write):
    path = write("env:\n  temperature: 1\n  gruop_size: 8\n")
    assert message_of(Settings, path) == f"{path}:3: unknown key 'gruop_size' in 'env'; did you mean 'group_size'?"


def test_unknown_key_far_from_all_lists_the_valid_ones(write):
    assert "valid: by_name, env, servers, testing" in message_of(Settings, write("zzz: 1\n"))


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [("servers:\n  - base_url: x\n  - base_ulr: y\n", "base_ulr", 3), ("by_name:\n  a:\n    wieght: 1\n", "wieght", 3)],
)
def test_unknown_keys_inside_lists_and_mappings_are_found(write, text, key, line):
    path = write(text)
    message = message_of(Settings, path)
    assert message.startswith(f"{path}:{line}: unknown key {key!r}")


def test_unknown_flag_names_the_flag():
    assert message_of(Settings, None, ["--env.group-sizes", "4"]).startswith("flag --env.group-sizes: unknown key")


def test_wrong_type_names_line_and_value(write):
    path = write("env:\n  group_size: many\n")
    message = message_of(Settings, path)
    assert message.startswith(f"{path}:2: env.group_size: ")
    assert "'many'" in message


def test_range_is_checked_for_flags(write):
    assert message_of(Settings, write("env: {}\n"), ["--env.group_size=0"]).startswith("flag --env.group_size: ")


def test_negative_numbers_work_with_and_without_equals_sign():
    assert load_config(Settings, None, ["--env.timeout_s", "-5"]).env.timeout_s == -5
    assert load_config(Settings, None, ["--env.timeout_s=-0.5"]).env.timeout_s == -0.5


def test_lists_and_dicts_work_as_flags():
    settings = load_config(Settings, None, ["--env.toolsets", "[terminal, file]", "--env.extra_body={top_k: 20}"])
    assert settings.env.toolsets == ["terminal", "file"]
    assert settings.env.extra_body == {"top_k": 20}


def test_a_flag_reaches_into_a_list(write):
    path = write("servers:\n  - base_url: a\n  - base_url: b\n")
    assert load_config(Settings, path, ["--servers.1.base_url", "c"]).servers[1].base_url == "c"
    assert "last position is 1" in message_of(Settings, path, ["--servers.2.base_url", "c"])


def test_a_text_field_takes_what_looks_like_a_number_or_null():
    assert load_config(Settings, None, ["--env.name", "007"]).env.name == "007"
    assert load_config(Settings, None, ["--env.name", "null"]).env.name is None


def test_a_flag_without_value_is_true():
    assert load_config(Settings, None, ["--testing"]).testing is True
    assert load_config(Settings, None, ["--testing", "false"]).testing is False


def test_a_stray_word_is_refused():
    assert "unexpected word 'group_size'" in message_of(Settings, None, ["group_size", "4"])


def test_duplicate_key_is_refused_with_both_lines(write):
    path = write("testing: true\nenv: {}\ntesting: false\n")
    assert message_of(Settings, path) == f"{path}:3: 'testing' is set twice, first in line 1"


def test_bad_yaml_names_the_line(write):
    path = write("env:\n  a: [1, 2\n")
    assert message_of(Settings, path).startswith(f"{path}:3: not valid YAML")


def test_a_list_at_the_top_is_refused(write):
    assert "a config is a mapping" in message_of(Settings, write("- 1\n"))


def test_merge_keys_work_and_own_keys_win(write):
    path = write("by_name:\n  a: &a\n    weight: 2\n    base_url: x\n  b:\n    <<: *a\n    weight: 3\n")
    b = load_config(Settings, path).by_name["b"]
    assert (b.weight, b.base_url) == (3, "x")


def test_empty_file_means_defaults(write):
    assert load_config(Settings, write("")) == Settings()


def test_a_secret_never_appears_in_a_message(write):
    assert "hunter2" not in message_of(Settings, write("servers:\n  - api_key: [hunter2]\n"))


def test_missing_file_names_the_nearest_shipped_config():
    assert "no config file 'nope.yaml'" in message_of(Settings, "nope.yaml")


def test_data_given_to_the_loader_is_not_changed_by_flags(write):
    path = write("env:\n  toolsets: [terminal]\n")
    load_config(Settings, path, ["--env.toolsets", "[]"])
    assert read_yaml(path).data == {"env": {"toolsets": ["terminal"]}}


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40))
def test_any_text_given_to_a_text_field_arrives_as_text_or_null(text):
    name = load_config(Settings, None, [f"--env.name={text}"]).env.name
    assert name is None or isinstance(name, str)


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(ConfigError, match=r"env\.name holds a character that no text has"):
        load_config(Settings, None, [f"--env.name={text}"])


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_survives_as_a_flag(number):
    assert load_config(Settings, None, ["--env.temperature", repr(number)]).env.temperature == number
