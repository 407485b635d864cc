"""The settings' reference is generated, and says what the code does."""

from pathlib import Path

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
