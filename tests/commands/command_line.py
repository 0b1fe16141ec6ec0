"""Command lines, run in this process."""

from click.testing import CliRunner, Result

from vit_ray.commands import cli


def run_cli(*words: str) -> Result:
    """What `vit-ray WORDS` gives: `exit_code`, `stdout`, `stderr`, and both in turn as `output`."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.vit_ray, words, prog_name="vit-ray")
