"""Codes and sessions of browsers at a hub."""

from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.hub.http.login import (
    CODE_LIFE_S,
    LIFE_S,
    MAX_CODES,
    LoginCodes,
    LoginService,
    LoginSessions,
    cookie_name,
)
from megatronapp_common.web.tokens import TokenRole, derive_token, new_secret

SECRET = "ab" * 32


def test_a_code_is_good_once_and_for_a_minute() -> None:
    clock = FakeClock(1000.0)
    codes = LoginCodes(clock=clock)
    first, late = codes.make(TokenRole.VIEWER), codes.make(TokenRole.CONTROLLER)
    assert first != late
    assert [codes.take(code) for code in (first, first, "other", "")] == [TokenRole.VIEWER, None, None, None]
    clock.now += CODE_LIFE_S - 1
    assert codes.take(codes.make(TokenRole.CONTROLLER)) is TokenRole.CONTROLLER
    clock.now += 1
    assert codes.take(late) is None


def test_the_oldest_of_too_many_codes_go_first() -> None:
    codes = LoginCodes()
    made = [codes.make(TokenRole.VIEWER) for _ in range(MAX_CODES + 1)]
    assert [codes.take(code) for code in (made[0], made[1], made[-1])] == [None, TokenRole.VIEWER, TokenRole.VIEWER]


def test_codes_of_one_role_do_not_evict_codes_of_another() -> None:
    codes = LoginCodes()
    mine = codes.make(TokenRole.CONTROLLER)
    for _ in range(2 * MAX_CODES):
        codes.make(TokenRole.VIEWER)
    assert codes.take(mine) is TokenRole.CONTROLLER
    assert codes.take(mine) is None


def test_a_session_survives_the_hub_and_ends_with_its_time() -> None:
    clock = FakeClock(1000.0)
    session = LoginSessions(SECRET, clock=clock).make(TokenRole.CONTROLLER)
    again = LoginSessions(SECRET, clock=clock)
    assert again.role_of(session) is TokenRole.CONTROLLER
    assert LoginSessions(new_secret(), clock=clock).role_of(session) is None
    clock.now += LIFE_S - 1
    assert again.role_of(session) is TokenRole.CONTROLLER
    clock.now += 1
    assert again.role_of(session) is None


@given(st.text(), st.integers(min_value=0, max_value=200))
def test_no_altered_text_is_a_session(text: str, at: int) -> None:
    sessions = LoginSessions(SECRET)
    session = sessions.make(TokenRole.VIEWER)
    changed = session[:at] + text + session[at + 1 :]
    assert (sessions.role_of(changed) is not None) is (changed == session)
    assert sessions.role_of(text) is None
    assert sessions.role_of(session.replace("viewer", "controller")) is None


def test_a_session_holds_nothing_of_the_token_and_is_none() -> None:
    logins, token = LoginService(SECRET, uid="u"), derive_token(SECRET, TokenRole.VIEWER)
    session = logins.log_in(token)
    assert session is not None
    assert token not in session
    assert logins.role_of_session(session) is TokenRole.VIEWER
    assert logins.role_of_token(session) is None
    assert logins.role_of_session(token) is None
    assert logins.log_in(session) is None
    assert logins.log_in(derive_token(SECRET, TokenRole.AGENT)) is None
    higher = logins.log_in(logins.codes.make(TokenRole.CONTROLLER))
    assert higher is not None
    assert logins.role_of_session(higher) is TokenRole.CONTROLLER
    assert logins.role_of_token(derive_token(SECRET, TokenRole.CONTROLLER)) is TokenRole.CONTROLLER


def test_cookies_of_two_jobs_do_not_meet() -> None:
    assert cookie_name("one") != cookie_name("two")
    assert LoginService(SECRET, uid="one").cookie == cookie_name("one")
