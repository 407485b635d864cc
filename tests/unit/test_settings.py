"""The settings' reference is generated, and says what the code does."""

from pathlib import Path

import pytest

from aenv.errors import InvalidRequest
from aenv.settings import Settings, reference

ROOT = Path(__file__).parents[2]


def test_the_reference_is_current():
    assert (ROOT / "docs/settings.md").read_text() == reference(), "run: python -m aenv.settings > docs/settings.md"


def test_every_setting_says_what_it_is():
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_file_and_environment(tmp_path, monkeypatch):
    (tmp_path / "aenv.toml").write_text("template_vcpus = 4\nslot_pool_size = 1\n")
    monkeypatch.setenv("AENV_CONFIG_PATH", str(tmp_path / "aenv.toml"))
    monkeypatch.setenv("AENV_SLOT_POOL_SIZE", "9")
    settings = Settings()
    assert (settings.template_vcpus, settings.slot_pool_size, settings.template_memory_mib) == (4, 9, 1024)


def test_a_list_in_the_environment_is_separated_by_commas(monkeypatch):
    monkeypatch.setenv("AENV_DNS_SERVERS", "9.9.9.9, 1.1.1.1")
    assert Settings().dns_servers == ["9.9.9.9", "1.1.1.1"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TEMPLATE_VCPUS", "many"),
        ("WARM_POOL_SIZE", "-1"),
        ("ACCELERATOR", "xen"),
        ("VMM", "bochs"),
        ("DEFAULT_ON_TIMEOUT", "sleep"),
        ("LOG_FORMAT", "xml"),
        ("LISTEN", "8000"),
        ("LISTEN", "127.0.0.1:65536"),
    ],
)
def test_a_wrong_value_is_named(name, value, monkeypatch):
    monkeypatch.setenv(f"AENV_{name}", value)
    with pytest.raises(InvalidRequest, match=f"setting {name.lower()}: ") as caught:
        Settings()
    assert f"AENV_{name}" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("home = [", "Invalid value"),
        ("hmoe = 1", "there is no setting hmoe"),
        ("listen = 8000", "setting listen: "),
    ],
)
def test_a_wrong_file_is_named(content, said, tmp_path, monkeypatch):
    file = tmp_path / "aenv.toml"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("AENV_CONFIG_PATH", str(file))
    with pytest.raises(InvalidRequest, match=said):
        Settings()
