"""https: the server's certificate is checked, and ours is shown when the cluster asks for one."""

import shutil
import ssl
import subprocess

import pytest

from sandbox_pool.providers.nomad.nomad_api import NomadApi, NomadError
from sandbox_pool.providers.nomad.nomad_options import NomadOptions
from support.nomad_recorded import RecordedNomad

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A certificate that signs itself, as Nomad's own tool names servers, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = "subjectAltName=DNS:server.global.nomad"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=nomad"]
    subprocess.run([*command, "-addext", names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.fixture
async def cluster(pair):
    cert, key = pair
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(cert))
    context.load_cert_chain(cert, key)
    context.verify_mode = ssl.CERT_REQUIRED
    async with RecordedNomad(tls=context) as nomad:
        yield nomad


async def jobs(cluster, **options):
    api = NomadApi(NomadOptions(address=cluster.address, api_timeout_s=0.2, **options))
    try:
        return await api.jobs("x")
    finally:
        await api.close()


async def test_with_authority_certificate_and_name_all_is_well(cluster, pair):
    cert, key = pair
    options = {"ca_cert": cert, "client_cert": cert, "client_key": key}
    assert await jobs(cluster, **options, tls_server_name="server.global.nomad") == []
    assert await jobs(cluster, client_cert=cert, client_key=key, tls_skip_verify=True) == []


@pytest.mark.parametrize("lacking", ["authority", "name", "own certificate"])
async def test_what_is_lacking_is_refused(cluster, pair, lacking):
    cert, key = pair
    options = {"ca_cert": cert, "client_cert": cert, "client_key": key, "tls_server_name": "server.global.nomad"}
    missing = {"authority": ["ca_cert"], "name": ["tls_server_name"], "own certificate": ["client_cert", "client_key"]}
    for name in missing[lacking]:
        del options[name]
    with pytest.raises(NomadError, match="does not answer"):
        await jobs(cluster, **options)
