"""Certificates for servers other than gRPC's: checked material for Python's `ssl`."""

import os
import ssl

from perseus.tls.files import Material


def server_context(material: Material) -> ssl.SSLContext:
    """Return a context with a certificate; if there are CAs, every client needs a certificate from them.

    It uses the checked contents, not the files, which may have been rewritten since.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    assert material.certificate is not None and material.key is not None  # noqa: PT018 - a server has both
    # Python reads certificates only from files; this file is private and in memory.
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
