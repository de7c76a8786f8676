"""Certificates for servers that are not gRPC's: what was read and checked, for Python's `ssl`."""

import os
import ssl

from perseus.tls.files import Material


def server_context(material: Material) -> ssl.SSLContext:
    """Return a context with a certificate; where there are CAs, every client must show one of theirs.

    What was checked is what is used: not the files, which may have been written to since.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    assert material.certificate is not None and material.key is not None  # noqa: PT018 - a server has both
    # Python reads certificates from files only; this one is nobody else's, and on no disk.
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(material.certificate.rstrip() + b"\n" + material.key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    if material.ca is not None:
        context.load_verify_locations(cadata=material.ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context
