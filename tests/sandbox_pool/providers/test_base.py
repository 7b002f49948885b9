import sys
from pathlib import Path
from types import ModuleType

import pytest

from sandbox_pool.config import PoolConfig
from sandbox_pool.providers import base
from sandbox_pool.spec import SandboxSpec


@pytest.fixture
def context(tmp_path):
    return base.ProviderContext.of(PoolConfig(state_dir=tmp_path), "owner")


class Plain:
    def __init__(self, context, options):
        self.context, self.options = context, options

    async def start(self, name, spec): ...

    async def stop(self, name): ...

    async def list(self): ...


class Shared(Plain):
    def host_key(self, spec):
        return "all"


def test_a_third_party_provider_is_loaded_by_its_import_path(context, monkeypatch):
    module = ModuleType("their_provider")
    module.Plain = Plain
    monkeypatch.setitem(sys.modules, "their_provider", module)
    provider = base.load_provider("their_provider:Plain", context, {"a": 1})
    assert provider.options == {"a": 1}
    assert provider.context is context


class Paced(Plain):
    create_interval_s = 0.25


def test_creates_are_paced_as_configured_else_as_the_provider_asks(context):
    plain, paced = Plain(context, {}), Paced(context, {})
    assert base.create_interval_s(plain, None) == base.DEFAULT_CREATE_INTERVAL_S
    assert base.create_interval_s(paced, None) == 0.25
    assert base.create_interval_s(paced, 0.0) == 0.0


def test_a_provider_whose_packages_are_missing_says_how_to_get_them(context, monkeypatch):
    monkeypatch.setitem(base.BUILT_IN, "modal", "no.such.package:Provider")
    with pytest.raises(ValueError, match=r"pip install 'hermes-rl\[modal\]'"):
        base.load_provider("modal", context, {})


def test_an_unknown_provider_is_refused_with_what_there_is(context):
    with pytest.raises(ValueError, match=r"no provider 'locl'; did you mean 'local'\?, or give module:Class"):
        base.load_provider("locl", context, {})


def test_a_provider_that_cannot_be_imported_says_so(context):
    with pytest.raises(ValueError, match="cannot be loaded"):
        base.load_provider("no_such_module:Thing", context, {})


def test_without_a_word_from_the_provider_every_spec_has_its_own_hosts():
    one, two = SandboxSpec(), SandboxSpec(memory_mb=1)
    apart, together = base.host_keys(Plain(None, None)), base.host_keys(Shared(None, None))
    assert apart(one) == apart(SandboxSpec())
    assert apart(one) != apart(two)
    assert together(one) == together(two)


def test_tokens_differ_by_host_and_user_and_are_found_again_by_name(context, tmp_path):
    other_user = base.ProviderContext.of(PoolConfig(state_dir=tmp_path / "other"), "owner")
    assert context.token("h1") == context.token("h1")
    assert len({context.token("h1"), context.token("h2"), other_user.token("h1")}) == 3


def test_the_key_behind_the_tokens_is_for_its_user_only(context):
    context.token("h1")
    key = context.state_dir / "pool.key"
    assert key.stat().st_mode & 0o077 == 0
    assert [path.name for path in context.state_dir.iterdir()] == ["pool.key"]


def test_a_host_does_not_show_its_token():
    assert "s3cret" not in repr(base.Host("h", "unix:/s", "s3cret"))


def test_the_settings_of_a_provider_survive_the_journal_without_secrets(tmp_path):
    config = PoolConfig(state_dir=tmp_path, slots_per_host=3, scratch_dir=Path("/fast"), min_isolation="uid")
    context = base.ProviderContext.of(config, "me")
    settings = context.settings({"address": "x", "token": "secret"})
    assert "secret" not in str(settings)
    again = base.ProviderContext.from_settings(settings, owner="gc", state_dir=tmp_path)
    assert (again.slots, again.scratch_dir, again.min_isolation) == (3, Path("/fast"), "uid")
    assert again.token("h") == context.token("h")
