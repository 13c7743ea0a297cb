"""What a process was given as a secret is in none of its texts."""

import logging

import pytest

from opd_trainer.hiding import hide
from opd_trainer.logs import configure_logging

TOKEN = "hf_abcdefghijklmnopqrstuvwx"


@pytest.mark.parametrize("name", ["HF_TOKEN", "OPD_TEACHER_API_KEY_BIG", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"])
def test_values_of_secret_variables_are_hidden(name: str) -> None:
    assert hide("401 for tops3cret-value at big", {name: "tops3cret-value"}) == "401 for *** at big"


@pytest.mark.parametrize(
    ("name", "value"),
    [("TOKENIZERS_PARALLELISM", "false"), ("HF_TOKEN_PATH", "/data/hub"), ("HOME", "tops3cret-value")],
)
def test_what_is_no_secret_stays(name: str, value: str) -> None:
    assert hide(f"see {value}", {name: value}) == f"see {value}"


@pytest.mark.parametrize(
    "text", [f"refused {TOKEN}", "Authorization: Bearer abcdef123456", "key sk-abcdefghijklmnop1234"]
)
def test_well_known_shapes_are_hidden_wherever_they_come_from(text: str) -> None:
    assert hide(text, {}).endswith("***")


def test_a_traceback_in_the_log_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "tops3cret-value")
    before = logging.getLogger().handlers[:]
    try:
        configure_logging()
        try:
            raise ValueError("bad tops3cret-value")
        except ValueError:
            logging.getLogger("test").exception("request with tops3cret-value failed")
    finally:
        logging.getLogger().handlers[:] = before
    said = capsys.readouterr().err
    assert "request with *** failed" in said
    assert "tops3cret" not in said
