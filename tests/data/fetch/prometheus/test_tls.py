"""TLS with a server that a private authority signed and that wants a client's certificate, all made here."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from reclaim.data.errors import ConfigError
from reclaim.data.fetch.prometheus.client import Access, Client
from tests.data.fetch.prometheus.answering import ok, serving


class _Authority:
    """An authority, and the certificates that it signs, in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.certificate = folder / f"{name}.pem"
        signed = self._builder(self._name, self._key.public_key(), authority=True).sign(self._key, hashes.SHA256())
        self.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePublicKey, *, authority: bool) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        usage = {name: False for name in ("content_commitment", "key_encipherment", "data_encipherment",
                                          "key_agreement", "encipher_only", "decipher_only")}  # fmt: skip
        return (
            builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(
                x509.KeyUsage(digital_signature=True, key_cert_sign=authority, crl_sign=authority, **usage),
                critical=True,
            )
        )

    def signs(self, name: str) -> tuple[Path, Path]:
        """Return the files of a new certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        signed = self._builder(subject, key.public_key(), authority=False).sign(self._key, hashes.SHA256())
        files = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ))  # fmt: skip
        return files


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Access]:
    """Run a server that shows and wants a certificate; yield what opens it."""
    ours, other = _Authority(tmp_path, "ours"), _Authority(tmp_path, "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*ours.signs("server"))
    context.load_verify_locations(ours.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    cert, key = ours.signs("client")
    other.signs("stranger")
    with serving(lambda *_: ok(7), context) as (url, _):
        yield Access(url.replace("http:", "https:"), ca=ours.certificate, cert=cert, key=key)


def test_a_private_authority_and_a_client_certificate_open_a_server(secured: Access) -> None:
    with Client(secured) as client:
        assert client.json("/api/v1/query", {}) == 7


def test_without_the_authority_or_the_certificate_one_line_says_so_at_once(secured: Access, tmp_path: Path) -> None:
    wrong: list[Access] = [
        replace(secured, ca=None),
        replace(secured, ca=tmp_path / "other.pem"),
        replace(secured, cert=None, key=None),
        replace(secured, cert=tmp_path / "stranger.pem", key=tmp_path / "stranger.key"),
    ]
    for access in wrong:
        closed = pytest.raises(ConfigError, match=r"no TLS connection .*; check --ca, and --cert with --key")
        with Client(access) as client, closed as error:
            client.json("/api/v1/query", {})
        assert "\n" not in str(error.value)
        assert client.requests == 1
