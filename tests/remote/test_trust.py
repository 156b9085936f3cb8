import asyncio
import logging

import asyncssh
import pytest

from dynctl.core.command import Command
from dynctl.core.inventory import HostEntry
from dynctl.errors import ConnectError, DynctlError, ExitCode, TrustError
from dynctl.remote.fleet import open_fleet


async def errors_of(entries, settings, confirm=None):
    async with open_fleet(entries, settings, confirm) as fleet:
        answers = await fleet.map(lambda _, remote: remote.run(Command(("true",))))
        return {name: answer for name, answer in answers.items() if isinstance(answer, DynctlError)}


async def one_error(sshd, home, confirm=None, settings=None, **changes):
    async with sshd.running():
        entry = home.entry(sshd, **changes)
        return (await errors_of([entry], settings or home.settings(), confirm)).get("h1")


def test_an_unknown_host_key_is_refused_with_its_fingerprint_and_the_next_step(sshd, home):
    error = asyncio.run(one_error(sshd, home))

    assert isinstance(error, TrustError)
    assert error.exit_code is ExitCode.TRUST
    where = f"[127.0.0.1]:{sshd.port}"
    assert error.message == (
        f"h1: the host key of {where} is not known: ssh-ed25519 {sshd.host_key.get_fingerprint()}"
    )
    line = f"{where} {sshd.host_key.export_public_key().decode().strip()}"
    assert line in error.hint
    assert sshd.num_logins == 0


def test_a_changed_host_key_is_always_refused_naming_line_and_both_fingerprints(
    sshd, home, host_keys
):
    """D2: also with accept-new and a person who would say yes; nothing secret is sent before."""

    async def main():
        async with sshd.running():
            (home.ssh / "known_hosts").write_text("# first line\n")
            home.known(sshd, key=host_keys[3])
            settings = home.settings(host_keys="accept-new")
            return (await errors_of([home.entry(sshd)], settings, _yes))["h1"]

    error = asyncio.run(main())

    assert error.exit_code is ExitCode.TRUST
    assert "has CHANGED" in error.message
    assert (
        f"{home.ssh}/known_hosts:2 has ssh-ed25519 {host_keys[3].get_fingerprint()}"
        in error.message
    )
    assert f"the host shows ssh-ed25519 {sshd.host_key.get_fingerprint()}" in error.message
    assert "ssh-keygen -R" in error.hint
    assert sshd.num_logins == 0


def test_a_host_known_by_another_kind_of_key_counts_as_changed(sshd, home):
    async def main():
        async with sshd.running():
            home.known(sshd, key=asyncssh.generate_private_key("ecdsa-sha2-nistp256"))
            return (await errors_of([home.entry(sshd)], home.settings()))["h1"]

    assert "has CHANGED" in asyncio.run(main()).message


def test_of_two_kinds_the_known_one_is_asked_for(sshd, home):
    """A host with several keys must show the kind we know, or it would look changed."""
    rsa = asyncssh.generate_private_key("ssh-rsa", key_size=2048)

    async def main():
        server = await asyncssh.listen(
            "127.0.0.1", 0, server_factory=asyncssh.SSHServer, server_host_keys=[sshd.host_key, rsa]
        )
        async with server:
            sshd.port = server.get_port()
            home.known(sshd, key=rsa)
            return (await errors_of([home.entry(sshd)], home.settings()))["h1"]

    assert "CHANGED" not in asyncio.run(main()).message


def test_a_revoked_host_key_is_refused(sshd, home):
    async def main():
        async with sshd.running():
            home.known(sshd)
            text = (home.ssh / "known_hosts").read_text()
            (home.ssh / "known_hosts").write_text(text + "@revoked " + text)
            return (await errors_of([home.entry(sshd)], home.settings()))["h1"]

    error = asyncio.run(main())
    assert isinstance(error, TrustError)
    assert "revoked" in error.message


def test_a_certified_host_key_is_accepted_through_its_authority(sshd, home):
    authority = asyncssh.generate_private_key("ssh-ed25519")

    async def main():
        certificate = authority.generate_host_certificate(
            sshd.host_key, "h1", principals=["127.0.0.1"]
        )
        server = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=asyncssh.SSHServer,
            server_host_keys=[(sshd.host_key, certificate)],
        )
        async with server:
            sshd.port = server.get_port()
            public = authority.export_public_key().decode()
            (home.ssh / "known_hosts").write_text(
                f"@cert-authority [127.0.0.1]:{sshd.port} {public}"
            )
            return (await errors_of([home.entry(sshd)], home.settings()))["h1"]

    error = asyncio.run(main())
    assert not isinstance(error, TrustError)


async def _yes(keys):
    return True


async def _no(keys):
    return False


def test_at_a_terminal_all_new_keys_are_asked_about_once_and_kept(sshd, second_sshd, home):
    asked = []

    async def confirm(keys):
        asked.append(sorted(key.name for key in keys))
        return True

    async def main():
        async with sshd.running(), second_sshd.running():
            entries = [home.entry(sshd, "h1"), home.entry(second_sshd, "h2")]
            first = await errors_of(entries, home.settings(), confirm)
            second = await errors_of(entries, home.settings(), confirm)
            return first, second

    assert asyncio.run(main()) == ({}, {})
    assert asked == [["h1", "h2"]]
    assert len((home.ssh / "known_hosts").read_text().splitlines()) == 2


def test_saying_no_adds_nothing(sshd, home):
    error = asyncio.run(one_error(sshd, home, _no))

    assert isinstance(error, TrustError)
    assert not (home.ssh / "known_hosts").exists()


def test_accept_new_accepts_unknown_keys_and_says_so(sshd, home, caplog):
    with caplog.at_level(logging.WARNING, logger="dynctl"):
        error = asyncio.run(one_error(sshd, home, None, home.settings(host_keys="accept-new")))

    assert error is None
    assert sshd.host_key.get_fingerprint() in caplog.text


def test_a_key_the_host_does_not_accept_is_named_and_no_password_is_tried(sshd, home):
    """D3"""
    sshd.authorized.clear()

    async def main():
        async with sshd.running():
            home.known(sshd)
            return (await errors_of([home.entry(sshd)], home.settings()))["h1"]

    error = asyncio.run(main())

    assert isinstance(error, ConnectError)
    assert error.exit_code is ExitCode.REFUSED
    assert "refused user ops" in error.message
    assert home.user_key.get_fingerprint() in error.message


def test_only_the_named_key_is_offered(sshd, home):
    named = asyncssh.generate_private_key("ssh-ed25519")
    named.write_private_key(str(home.path / "deploy"))

    async def main():
        async with sshd.running():
            home.known(sshd)
            entry = home.entry(sshd, key="~/deploy")
            return (await errors_of([entry], home.settings()))["h1"]

    error = asyncio.run(main())

    assert len(sshd.offered_users) == 1
    assert named.get_fingerprint() in error.message
    assert home.user_key.get_fingerprint() not in error.message


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda home: None, "cannot read the key"),
        (
            lambda home: asyncssh.generate_private_key("ssh-ed25519").write_private_key(
                str(home.path / "deploy"), "pkcs8-pem", passphrase="secret"
            ),
            "locked by a passphrase",
        ),
    ],
    ids=["missing", "locked"],
)
def test_a_named_key_that_cannot_be_used_is_an_error_before_anything_is_sent(
    sshd, home, make, says
):
    make(home)

    async def main():
        async with sshd.running():
            home.known(sshd)
            entry = home.entry(sshd, key=str(home.path / "deploy"))
            return (await errors_of([entry], home.settings()))["h1"]

    assert says in asyncio.run(main()).message
    assert sshd.num_logins == 0


def test_without_any_key_the_next_step_is_said(sshd, home):
    for file in home.ssh.iterdir():
        file.unlink()

    async def main():
        async with sshd.running():
            home.known(sshd)
            return (await errors_of([home.entry(sshd)], home.settings()))["h1"]

    error = asyncio.run(main())
    assert "no SSH key to offer" in error.message
    assert "ssh-keygen" in error.hint


def test_no_agent_and_no_display_is_ever_forwarded(sshd, home):
    """S5: even when the user's own configuration asks for it."""
    seen = []

    async def main():
        async with sshd.running():
            home.known(sshd)
            (home.ssh / "config").write_text("Host *\n ForwardAgent yes\n ForwardX11 yes\n")
            async with open_fleet([home.entry(sshd)], home.settings()) as fleet:
                await (await fleet.reach("h1")).run(Command(("true",)))
                seen.extend(conn.get_agent_path() for conn in sshd.connections)

    asyncio.run(main())
    assert seen == [None]


def test_a_jump_host_is_opened_once_and_every_hop_checks_its_own_key(sshd, second_sshd, home):
    third = type(sshd)(asyncssh.generate_private_key("ssh-ed25519"), sshd.authorized)

    async def main():
        async with sshd.running(), second_sshd.running(), third.running():
            (home.ssh / "config").write_text(
                f"Host bastion\n HostName 127.0.0.1\n Port {sshd.port}\n User jumper\n"
                f"Host gpu-01\n HostName 127.0.0.1\n Port {second_sshd.port}\n ProxyJump bastion\n"
            )
            home.known(sshd)
            home.known(second_sshd)
            home.known(third)
            entries = [
                HostEntry("gpu-01", "gpu-01", user="ops"),
                home.entry(third, "gpu-02", jump="bastion"),
            ]
            async with open_fleet(entries, home.settings()) as fleet:
                command = Command(("echo", "hi"))
                done = await fleet.map(lambda entry, remote: remote.run(command))
            return {name: result.stdout for name, result in done.items()}

    assert asyncio.run(main()) == {"gpu-01": b"hi\n", "gpu-02": b"hi\n"}
    assert sshd.num_logins == 1
    assert sshd.offered_users[0] == "jumper"
    assert second_sshd.offered_users[0] == "ops"


def test_an_error_at_a_jump_host_names_host_and_hop(sshd, second_sshd, home):
    async def main():
        async with sshd.running(), second_sshd.running():
            home.known(second_sshd)
            sshd.authorized = []
            home.known(sshd)
            entry = home.entry(second_sshd, jump=f"ops@127.0.0.1:{sshd.port}")
            return (await errors_of([entry], home.settings()))["h1"]

    error = asyncio.run(main())
    assert error.message.startswith("h1: jump host 127.0.0.1: ")
    assert "refused user ops" in error.message


def test_new_keys_behind_a_new_jump_host_are_settled_too(sshd, second_sshd, home):
    async def main():
        async with sshd.running(), second_sshd.running():
            entry = home.entry(second_sshd, jump=f"127.0.0.1:{sshd.port}")
            return await errors_of([entry], home.settings(), _yes)

    assert asyncio.run(main()) == {}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"address": "no-such-host.invalid", "port": None},
            "cannot resolve 'no-such-host.invalid'",
        ),
        ({"address": "-oProxyCommand=x"}, "is no host name"),
        ({"user": "$(id)"}, "is no user name"),
        ({"user": "-l"}, "is no user name"),
        ({"jump": "a;b"}, "is no host name"),
    ],
)
def test_bad_names_end_in_one_sentence(sshd, home, changes, says):
    error = asyncio.run(one_error(sshd, home, **changes))

    assert isinstance(error, ConnectError)
    assert says in error.message


def test_a_closed_port_is_named(sshd, home, free_ports):
    sshd.port = free_ports()

    async def main():
        return (await errors_of([home.entry(sshd)], home.settings()))["h1"]

    error = asyncio.run(main())
    assert f"127.0.0.1 port {sshd.port}" in error.message
    assert error.message.endswith("Connection refused")


def test_a_server_that_drops_us_before_login_is_tried_again_a_few_times(home):
    """D6: a busy sshd does that (MaxStartups)."""
    count = 0

    async def drop(reader, writer):
        nonlocal count
        count += 1
        writer.transport.abort()

    async def main():
        server = await asyncio.start_server(drop, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            entry = HostEntry("h1", "127.0.0.1", user="ops", port=port)
            return (await errors_of([entry], home.settings()))["h1"]

    error = asyncio.run(main())
    assert "closed the connection 3 times before login" in error.message
    assert count == 3


def test_a_silent_server_ends_at_the_time_limit(home):
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    async def main():
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            entry = HostEntry("h1", "127.0.0.1", user="ops", port=port)
            errors = await errors_of([entry], home.settings(connect_timeout_s=0.5))
            await asyncio.sleep(0.05)
            return errors["h1"]

    assert "within 0.5 s" in asyncio.run(main()).message


def test_an_unknown_keyword_in_the_ssh_config_is_no_obstacle_but_a_broken_line_is_named(sshd, home):
    """V5"""

    async def main():
        async with sshd.running():
            home.known(sshd)
            (home.ssh / "config").write_text("Host *\n NewFangled yes\n")
            fine = await errors_of([home.entry(sshd)], home.settings())
            (home.ssh / "config").write_text("Host *\n ServerAliveInterval soon\n")
            broken = await errors_of([home.entry(sshd)], home.settings())
            return fine, broken["h1"]

    fine, broken = asyncio.run(main())
    assert fine == {}
    assert "config line 2" in broken.message


def test_a_jump_loop_ends(sshd, home):
    async def main():
        async with sshd.running():
            (home.ssh / "config").write_text("Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
            return (await errors_of([HostEntry("h1", "a")], home.settings()))["h1"]

    assert "go round in a circle" in asyncio.run(main()).message
