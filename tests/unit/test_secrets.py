import hashlib
import hmac
import os
import re
import threading
from pathlib import Path

import pytest

from aenv.api.keys import load_api_key, matches
from aenv.errors import CorruptData, InvalidRequest, OperationFailed
from aenv.node.tokens import Tokens
from aenv.settings import Settings

SEED = "ab" * 32


def test_tokens_are_hmacs_of_the_sandbox_id() -> None:
    def expected(text: str) -> str:
        return hmac.new(SEED.encode(), text.encode(), hashlib.sha256).hexdigest()

    tokens = Tokens(SEED)
    assert tokens.envd("i0") == expected("i0")
    assert tokens.traffic("i0") == expected("sandbox-traffic-i0")
    assert len({tokens.envd("i0"), tokens.envd("i1"), tokens.traffic("i0"), Tokens("cd" * 32).envd("i0")}) == 4
    assert SEED not in repr(tokens)


def test_the_seed_is_made_once(tmp_path: Path) -> None:
    first = Tokens.load(tmp_path / "secrets")
    assert Tokens.load(tmp_path / "secrets").envd("i0") == first.envd("i0")
    assert (tmp_path / "secrets" / "sandbox-token-seed").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (tmp_path / "secrets").iterdir()] == ["sandbox-token-seed"]


def test_a_generated_key_has_the_form_old_sdks_insist_on(tmp_path: Path) -> None:
    key = load_api_key(Settings(home=tmp_path), tmp_path / "secrets")
    assert re.fullmatch(r"e2b_[0-9a-f]{40}", key)
    assert load_api_key(Settings(home=tmp_path), tmp_path / "secrets") == key


def test_the_setting_wins_over_the_file(tmp_path: Path) -> None:
    assert load_api_key(Settings(home=tmp_path, api_key="k" * 32), tmp_path / "secrets") == "k" * 32
    assert not (tmp_path / "secrets").exists()


@pytest.mark.parametrize("key", ["short", "x" * 257, "k" * 31 + " ", "k" * 31 + "ä", "k" * 32 + "\n"])
def test_a_malformed_setting_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidRequest, match="32 to 256"):
        load_api_key(Settings(home=tmp_path, api_key=key), tmp_path / "secrets")


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff" * 40, b"k" * 5000, b"two\n" + b"k" * 40])
def test_a_malformed_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secrets" / "api-key"
    path.parent.mkdir()
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(CorruptData, match="api-key"):
        load_api_key(Settings(home=tmp_path), tmp_path / "secrets")
    assert path.read_bytes() == content


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_file_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    key = load_api_key(Settings(home=tmp_path), tmp_path / "secrets")
    path = tmp_path / "secrets" / "api-key"
    path.chmod(mode)
    with pytest.raises(OperationFailed, match="chmod 600") as raised:
        load_api_key(Settings(home=tmp_path), tmp_path / "secrets")
    assert key not in str(raised.value)


def test_a_link_and_a_directory_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "api-key"
    path.parent.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch(mode=0o600)
    elsewhere.write_text("k" * 40)
    path.symlink_to(elsewhere)
    with pytest.raises(OperationFailed):
        load_api_key(Settings(home=tmp_path), tmp_path / "secrets")
    path.unlink()
    path.mkdir()
    with pytest.raises(OperationFailed, match="regular"):
        load_api_key(Settings(home=tmp_path), tmp_path / "secrets")


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "api-key"
    path.parent.mkdir()
    os.mkfifo(path, 0o600)
    with pytest.raises(OperationFailed, match="regular"):
        load_api_key(Settings(home=tmp_path), tmp_path / "secrets")


def test_servers_that_start_at_once_agree(tmp_path: Path) -> None:
    keys: list[str] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        keys.append(load_api_key(Settings(home=tmp_path), tmp_path / "secrets"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1


def test_keys_are_compared_as_bytes() -> None:
    assert matches(b"k" * 32, "k" * 32)
    assert not matches(b"", "k" * 32)
    assert not matches("ä".encode("latin-1"), "k" * 32)
