"""Make what a federation needs for TLS and node authentication: an authority, the server's certificate, node keys.

    python examples/hospital/keys.py FOLDER --name fl.example.org --nodes 3

On one machine all files end up in FOLDER. In earnest, each node makes its own key (`ssh-keygen -t ecdsa -b 384`) and
sends only the .pub file; the authority's key stays offline.
"""

import argparse
import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

DAYS = 365


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _certificate(
    subject: str, key: ec.EllipticCurvePrivateKey, issuer: str, issuer_key: ec.EllipticCurvePrivateKey, names: list[str]
) -> x509.Certificate:
    """Return a certificate for some host names and addresses, or of an authority if there are none."""
    now = datetime.datetime.now(datetime.UTC)
    called = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, issuer)]
    builder = (
        x509.CertificateBuilder()
        .subject_name(called[0])
        .issuer_name(called[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=not names, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
    else:
        usage = dict.fromkeys(
            ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
             "encipher_only", "decipher_only"), False
        )  # fmt: skip
        builder = builder.add_extension(x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True), critical=True)
    return builder.sign(issuer_key, hashes.SHA384())


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def make_keys(folder: Path, names: list[str], nodes: int) -> None:
    """Write ca.crt, ca.key, server.pem, server.key, and node-NUMBER with node-NUMBER.pub."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca = _certificate("gradveil example authority", authority, "gradveil example authority", authority, [])
    own = _certificate(names[0], server, "gradveil example authority", authority, names)
    (folder / "ca.crt").write_bytes(ca.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(own.public_bytes(Encoding.PEM))
    for name, key in (("ca.key", authority), ("server.key", server)):
        write_secret(folder / name, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for number in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        write_secret(folder / f"node-{number}", secret)
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        (folder / f"node-{number}.pub").write_bytes(public + b"\n")


def main() -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", action="append", help="host name or address of the server; may be repeated")
    parser.add_argument("--nodes", type=int, default=3)
    given = parser.parse_args()
    make_keys(given.folder, given.name or ["localhost", "127.0.0.1"], given.nodes)


if __name__ == "__main__":
    main()
