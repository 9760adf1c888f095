from importlib import import_module

import click
import pytest


@pytest.mark.parametrize("name", ["train", "verify", "generate", "serve", "convert"])
def test_runtime_commands_are_click_commands_of_their_file(name: str) -> None:
    command = import_module(f"plait.cli.{name}").command
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.help
