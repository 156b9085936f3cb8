"""What the terminal is told when a command ends early."""

import asyncio
import os
import signal

import pytest

from dynctl.cli.output import Stage, wait_for


async def interrupted(stage, text):
    stage.if_interrupted = text
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(30)


def test_ctrl_c_says_what_is_left_at_the_stage_reached(capsys):
    stage = Stage("interrupted; nothing was changed")

    with pytest.raises(KeyboardInterrupt):
        wait_for(interrupted(stage, "interrupted; go on with dynctl up"), stage)

    assert capsys.readouterr().err == "interrupted; go on with dynctl up\n"


def test_ctrl_c_says_so_where_nothing_is_left(capsys):
    with pytest.raises(KeyboardInterrupt):
        wait_for(interrupted(Stage(), ""))

    assert capsys.readouterr().err == "interrupted\n"
