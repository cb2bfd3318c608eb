"""Tokens are derived from one secret, and none can replace another."""

import hashlib
import hmac
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.web.tokens import SECRET_BYTES, TokenRole, derive_token, is_valid_token, new_secret, read_secret

secrets = st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES).map(bytes.hex)


def test_a_known_token() -> None:
    expected = hmac.new(bytes(32), b"megatronapp:agent", hashlib.sha256).hexdigest()
    assert derive_token("00" * 32, TokenRole.AGENT) == expected


@given(secrets, secrets)
def test_a_token_proves_its_role_under_its_secret_only(first: str, second: str) -> None:
    for role in TokenRole:
        token = derive_token(first, role)
        assert {r for r in TokenRole if is_valid_token(first, r, token)} == {role}
        assert is_valid_token(second, role, token) == (first == second)


@pytest.mark.parametrize("token", ["", "0" * 64, "x"])
def test_wrong_tokens(token: str) -> None:
    assert not is_valid_token("11" * 32, TokenRole.VIEWER, token)


def test_secrets_are_fresh() -> None:
    made = {new_secret() for _ in range(50)}
    assert len(made) == 50
    assert all(len(bytes.fromhex(secret)) == SECRET_BYTES for secret in made)


def test_a_secret_is_read_without_its_line_end(tmp_path: pathlib.Path) -> None:
    (tmp_path / "secret").write_text("ab" * 32 + "\n", encoding="ascii")
    assert read_secret(tmp_path / "secret") == "ab" * 32
