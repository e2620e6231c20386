import os
import subprocess
import sys

import pytest

from seqloom import cli as command
from seqloom.errors import LeftEarly, SeqloomError
from seqloom.version import __version__


def test_version_of_the_module():
    shown = subprocess.run([sys.executable, "-m", "seqloom", "--version"], capture_output=True, text=True)
    assert shown.stdout.strip() == f"seqloom {__version__}"


def test_every_verb_has_help_with_an_example(run):
    verbs = [str(verb.name) for verb in command.app.registered_commands]
    assert "doctor" in verbs
    for verb in (*verbs, "data prepare"):
        shown = run(f"{verb} --help")
        assert shown.code == 0
        assert f"seqloom {verb}" in shown.out.partition("Example")[2], f"{verb} --help shows no example"
        assert "--json" in shown.out


def test_the_list_of_verbs_has_whole_sentences(run):
    shown = run("--help").out
    assert "..." not in shown.partition("Commands:")[2] and "how far it is from the bound" in " ".join(shown.split())


def test_the_shell_completes_verbs_and_options():
    def completed(words: str) -> list[str]:
        asked = {"_SEQLOOM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        shown = subprocess.run(
            [sys.executable, "-m", "seqloom"], env=os.environ | asked, capture_output=True, text=True
        )
        return shown.stdout.split()

    assert completed("seqloom comp") == ["compare"]
    assert completed("seqloom plan --lengt") == ["--lengths"]


def test_unknown_option_and_verb_exit_with_2(run):
    assert run("doctor --clutser x").code == 2
    assert run("docter").code == 2


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (SeqloomError("no such thing; try another"), "seqloom: no such thing; try another\n", 2),
        (
            PermissionError(13, "Permission denied", "plan.json"),
            "seqloom: cannot use 'plan.json': Permission denied; check the path and its permissions\n",
            2,
        ),
        (LeftEarly("left after step 3"), "seqloom: left after step 3\n", 75),
    ],
)
def test_a_refused_request_is_one_message_and_an_exit_code(error, message, code, monkeypatch, capsys):
    def refuse(prog_name: str) -> None:
        raise error

    monkeypatch.setattr(command, "app", refuse)
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == code
    assert capsys.readouterr() == ("", message)


def test_a_bug_keeps_its_traceback(monkeypatch):
    def fail(prog_name: str) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(command, "app", fail)
    with pytest.raises(KeyError):
        command.main()
