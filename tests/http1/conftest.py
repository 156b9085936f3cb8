"""A pair of sockets speaking raw bytes to a server, on both event loops."""

import asyncio
import datetime as dt
import ssl
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dynctl.http1.server import Exchange, ServerLimits, serve


def echo(exchange: Exchange) -> None:
    """Answer with what was asked."""
    request = exchange.request
    exchange.respond(200, request.method.encode() + b" " + request.target + b" " + request.body)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine function to its end on each event loop; leftover tasks fail the test."""

    def run_on_loop(main: Callable[[], Awaitable[object]]) -> object:
        async def guarded() -> object:
            faults: list[dict] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
            async with asyncio.timeout(150):
                result = await main()
            await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left: {left}"
            assert not faults, faults
            return result

        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(guarded())

    return run_on_loop


@asynccontextmanager
async def serving(handler=echo, **options):
    """A server on a loopback port, closed without grace."""
    options.setdefault("host", "127.0.0.1")
    options.setdefault("port", 0)
    limits = options.pop("limits", None) or ServerLimits(linger_s=0.4)
    server = await serve(handler, limits=limits, **options)
    try:
        yield server
    finally:
        await server.close(0)


async def converse(port: int, *pieces: bytes, shut: bool = False) -> bytes:
    """Send pieces, each as an own segment, and read until the server closes or is done."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if shut:
            writer.write_eof()
        answer = bytearray()
        while data := await asyncio.wait_for(reader.read(65536), 60):
            answer += data
        return bytes(answer)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.fixture
def server_at():
    """The context manager `serving`."""
    return serving


@pytest.fixture
def talk():
    """The coroutine function `converse`."""
    return converse


def name_of(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


class Authority:
    """A small certificate authority in a folder."""

    def __init__(self, folder) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._cert = self._sign(name_of("test CA"), self._key, is_ca=True)
        self.ca_file = folder / "ca.crt"
        self.ca_file.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def _sign(self, subject, key, is_ca=False, dns=()):
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(name_of("test CA"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if dns:
            names = x509.SubjectAlternativeName([x509.DNSName(one) for one in dns])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def issue(self, common_name: str, *dns: str):
        """Write certificate and key of a peer; return their paths."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self._sign(name_of(common_name), key, dns=dns)
        stem = common_name.replace(":", "-")
        cert_file, key_file = self._folder / f"{stem}.crt", self._folder / f"{stem}.key"
        cert_file.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return cert_file, key_file

    def server_context(self, *dns: str) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(*self.issue("server", *dns))
        return context

    def client_context(self, common_name: str | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca_file)
        if common_name:
            context.load_cert_chain(*self.issue(common_name))
        return context


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)
