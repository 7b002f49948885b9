"""Options and the variables of Nomad's own command line."""

import ssl

import pytest
from pydantic import ValidationError

from sandbox_pool.providers.nomad.nomad_options import NomadOptions


def test_variables_fill_in_what_options_leave_open():
    environ = {"NOMAD_ADDR": "https://n:4646", "NOMAD_NAMESPACE": "rl", "NOMAD_REGION": "eu", "NOMAD_SKIP_VERIFY": "1"}
    options = NomadOptions.resolve({"namespace": "mine"}, environ)
    assert (options.address, options.namespace, options.region) == ("https://n:4646", "mine", "eu")
    assert options.tls_skip_verify is True


def test_the_defaults_are_those_of_nomads_command_line():
    options = NomadOptions.resolve({}, {})
    assert (options.address, options.namespace, options.region) == ("http://127.0.0.1:4646", "default", None)


def test_an_unknown_option_is_refused():
    with pytest.raises(ValidationError, match="memroy_mb"):
        NomadOptions(memroy_mb=1)


def test_text_from_a_command_line_is_converted():
    options = NomadOptions(memory_mb="2000", privileged="true", cap_add="a, b", blocked_timeout_s="1.5")
    assert (options.memory_mb, options.privileged, options.cap_add) == (2000, True, ("a", "b"))


def test_the_token_is_found_in_order(monkeypatch, tmp_path):
    monkeypatch.setenv("NOMAD_TOKEN", "from-environment")
    (tmp_path / "acl").write_text("from-file\n")
    assert NomadOptions().acl_token() == "from-environment"
    assert NomadOptions(acl_file=tmp_path / "acl").acl_token() == "from-file"
    assert NomadOptions(acl_file=tmp_path / "acl", token="given").acl_token() == "given"
    monkeypatch.delenv("NOMAD_TOKEN")
    assert NomadOptions().acl_token() is None


def test_the_token_is_not_shown():
    assert "secret-token" not in repr(NomadOptions(token="secret-token"))


def test_tls_is_verified_unless_told_otherwise():
    assert NomadOptions(address="http://n").tls() is None
    strict = NomadOptions(address="https://n").tls()
    assert strict.verify_mode == ssl.CERT_REQUIRED
    assert strict.check_hostname
    assert NomadOptions(address="https://n", tls_skip_verify=True).tls().verify_mode == ssl.CERT_NONE


def test_a_certificate_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(OSError):
        NomadOptions(address="https://n", ca_cert=tmp_path / "none.pem").tls()
