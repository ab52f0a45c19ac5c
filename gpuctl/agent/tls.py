"""TLS 1.3 between the agents of one run: both sides show, and accept only, the run's certificate."""

from __future__ import annotations

import os
import ssl


def context(certificate_pem: str, key_pem: str, directory: str, *, is_server: bool) -> ssl.SSLContext:
    """Return the context of one side; the key lies 0600 in ``directory`` because OpenSSL reads files."""
    purpose = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    made = ssl.SSLContext(purpose)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # one certificate for all agents: possession of its key is the identity
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=certificate_pem)
    path = os.path.join(directory, "tls.pem")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(certificate_pem + key_pem)
    made.load_cert_chain(path)
    return made
