"""The certificate of one run: all its agents show it and accept nothing else."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

VALID_DAYS = 3650


@dataclass(frozen=True)
class RunCertificate:
    """A self-signed P-256 certificate and its key, PEM. The key is a secret of this run."""

    certificate: str
    key: str


def make_certificate(run_id: str) -> RunCertificate:
    """Make the certificate of a run (4 ms). Valid from a day ago: clocks of nodes differ."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    # a common name holds 64 characters at most (RFC 5280, ub-common-name)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, run_id[-64:])])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return RunCertificate(certificate.public_bytes(serialization.Encoding.PEM).decode(), pem.decode())
