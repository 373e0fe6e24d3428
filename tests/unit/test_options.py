"""Options: one declaration, many spellings, errors in the user's words."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from chasqui.errors import OptionError
from chasqui.options import (
    MOST,
    ConnectionOptions,
    ConsumerOptions,
    ProducerOptions,
    PromoterOptions,
    SchedulerOptions,
    Spelling,
    build,
    check,
    described,
    from_environment,
    option,
    spell,
    table,
)

SECRETS = {"url": "redis://:s3cret@127.0.0.1", "tls_key": "/s3cret.pem", "sentinel_password": "s3cret"}
DURATION = "milliseconds, a timedelta or text such as 500ms, 30s, 24h"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A role of the tests' own, for kinds of options that the producer has none of."""

    ratio: float = option(0.5, min=0, max=1, help="A share.")
    label: str | None = option(None, help="A label.")

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    ("spelling", "written"),
    [
        ("python", "max_stream_len"),
        ("toml", "max_stream_len"),
        ("spark", "maxStreamLen"),
        ("cli", "--max-stream-len"),
        ("env", "CHASQUI_MAX_STREAM_LEN"),
    ],
)
def test_one_name_gives_each_spelling(spelling: Spelling, written: str) -> None:
    assert spell("max_stream_len", spelling) == written
    assert build(ProducerOptions, {written: "7"}, spelling=spelling).max_stream_len == 7


@pytest.mark.parametrize("written", ["maxstreamlen", "MAXSTREAMLEN", " maxStreamLen "])
def test_case_and_blanks_around_a_name_do_not_matter(written: str) -> None:
    assert build(ProducerOptions, {written: "7"}, spelling="spark").max_stream_len == 7


def test_name_in_the_spelling_of_another_place_is_unknown() -> None:
    with pytest.raises(OptionError, match="did you mean maxStreamLen"):
        build(ProducerOptions, {"max_stream_len": "7"}, spelling="spark")


@pytest.mark.parametrize(
    ("spelling", "written", "nearest"),
    [
        ("python", "qeue", "queue"),
        ("python", "max_stream_length", "max_stream_len"),
        ("spark", "poolsise", "poolSize"),
        ("cli", "--overflw", "--overflow"),
        ("env", "CHASQUI_DEDUP_TL", "CHASQUI_DEDUP_TTL"),
    ],
)
def test_unknown_option_names_the_nearest(spelling: Spelling, written: str, nearest: str) -> None:
    with pytest.raises(OptionError) as caught:
        build(ProducerOptions, {written: "1"}, spelling=spelling)

    assert f"unknown option {written!r}; did you mean {nearest}?" in caught.value.message


def test_unknown_option_lists_all_that_are_known() -> None:
    with pytest.raises(OptionError) as caught:
        build(ProducerOptions, {"zzz": "1"}, spelling="spark")

    _, _, known = caught.value.message.partition("Known: ")
    assert known.split(", ") == sorted(spell(f.name, "spark") for f in dataclasses.fields(ProducerOptions))


BAD_VALUES: list[tuple[Spelling, dict[str, Any], str]] = [
    ("python", {"pool_size": "x"}, "pool_size expects a whole number from 1 to 10000, got 'x'"),
    ("python", {"pool_size": ""}, "pool_size expects a whole number from 1 to 10000, got ''"),
    ("python", {"pool_size": "1.5"}, "pool_size expects a whole number from 1 to 10000, got '1.5'"),
    ("python", {"pool_size": "1_0"}, "pool_size expects a whole number from 1 to 10000, got '1_0'"),
    ("python", {"pool_size": "٣"}, "pool_size expects a whole number from 1 to 10000, got '٣'"),
    ("python", {"pool_size": 1.0}, "pool_size expects a whole number from 1 to 10000, got 1.0"),
    ("python", {"pool_size": True}, "pool_size expects a whole number from 1 to 10000, got True"),
    ("python", {"pool_size": None}, "pool_size expects a whole number from 1 to 10000, got None"),
    ("python", {"pool_size": 0}, "pool_size expects a whole number from 1 to 10000, got 0"),
    ("python", {"pool_size": 10_001}, "pool_size expects a whole number from 1 to 10000, got 10001"),
    ("python", {"max_stream_len": "0"}, "max_stream_len expects a whole number, at least 1, got '0'"),
    ("python", {"reconnect_attempts": -1}, "reconnect_attempts expects a whole number, at least 0, got -1"),
    ("python", {"raw": "maybe"}, "raw expects true or false, got 'maybe'"),
    ("python", {"raw": 1}, "raw expects true or false, got 1"),
    ("python", {"queue": 5}, "queue expects text, got 5"),
    ("python", {"queue": b"q"}, "queue expects text, got b'q'"),
    ("python", {"tls_ca": 5}, "tls_ca expects text, got 5"),
    ("python", {"overflow": "drop"}, "overflow expects one of reject, block, trim, got 'drop'"),
    ("python", {"overflow": None}, "overflow expects one of reject, block, trim, got None"),
    ("python", {"block_timeout": "soon"}, f"block_timeout expects {DURATION}, at least 0, got 'soon'"),
    ("python", {"block_timeout": "-1s"}, f"block_timeout expects {DURATION}, at least 0, got '-1s'"),
    ("python", {"block_timeout": "1 year"}, f"block_timeout expects {DURATION}, at least 0, got '1 year'"),
    ("python", {"block_timeout": 1.5}, f"block_timeout expects {DURATION}, at least 0, got 1.5"),
    ("python", {"block_timeout": True}, f"block_timeout expects {DURATION}, at least 0, got True"),
    ("python", {"block_timeout": -1}, f"block_timeout expects {DURATION}, at least 0, got -1"),
    (
        "python",
        {"block_timeout": timedelta(seconds=-1)},
        f"block_timeout expects {DURATION}, at least 0, got datetime.timedelta(days=-1, seconds=86399)",
    ),
    ("python", {"dedup_ttl": "999ms"}, f"dedup_ttl expects {DURATION}, at least 1000, got '999ms'"),
    ("python", {"queue": "\udcff"}, r"queue expects text, got '\udcff'"),
    ("python", {"max_stream_len": 2**70}, f"max_stream_len expects a whole number from 1 to {MOST}, got {2**70}"),
    (
        "python",
        {"socket_timeout_ms": 86_400_001},
        "socket_timeout_ms expects a whole number from 1 to 86400000, got 86400001",
    ),
    ("spark", {"poolsize": "x"}, "poolSize expects a whole number from 1 to 10000, got 'x'"),
    ("spark", {"maxStreamLen": "-3"}, "maxStreamLen expects a whole number, at least 1, got '-3'"),
    ("spark", {"RAW": "2"}, "raw expects true or false, got '2'"),
    ("spark", {"overflow": "Reject"}, "overflow expects one of reject, block, trim, got 'Reject'"),
    ("spark", {"blockTimeout": "1x"}, f"blockTimeout expects {DURATION}, at least 0, got '1x'"),
    ("spark", {"dedupttl": "0"}, f"dedupTtl expects {DURATION}, at least 1000, got '0'"),
    ("cli", {"--pool-size": "x"}, "--pool-size expects a whole number from 1 to 10000, got 'x'"),
    ("env", {"CHASQUI_RAW": "x"}, "CHASQUI_RAW expects true or false, got 'x'"),
]


@pytest.mark.parametrize(("spelling", "given", "message"), BAD_VALUES, ids=[str(row[1]) for row in BAD_VALUES])
def test_bad_value_is_refused_in_the_users_words(spelling: Spelling, given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        build(ProducerOptions, given, spelling=spelling)

    assert caught.value.message == message


@pytest.mark.parametrize("value", ["x", "", True, None, "nan", float("nan"), "inf", -0.1, 1.1])
def test_bad_number_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="ratio expects a number from 0 to 1, got "):
        build(Sample, {"ratio": value})


def test_endless_value_is_cut_in_the_error() -> None:
    with pytest.raises(OptionError) as caught:
        build(ProducerOptions, {"overflow": "x" * 100_000})

    assert len(str(caught.value)) < 200


def test_options_made_directly_are_checked_too() -> None:
    with pytest.raises(OptionError, match="pool_size expects a whole number from 1 to 10000, got 0"):
        ProducerOptions(pool_size=0)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"pool_size": "12"}, "pool_size", 12),
        ({"pool_size": " +12 "}, "pool_size", 12),
        ({"raw": "TRUE"}, "raw", True),
        ({"raw": "on"}, "raw", True),
        ({"raw": "0"}, "raw", False),
        ({"raw": "No"}, "raw", False),
        ({"tls_ca": None}, "tls_ca", None),
        ({"overflow": "trim"}, "overflow", "trim"),
    ],
)
def test_text_becomes_the_options_type(given: dict[str, Any], name: str, value: Any) -> None:
    converted = getattr(build(ProducerOptions, given), name)

    assert (converted, type(converted)) == (value, type(value))


@pytest.mark.parametrize(
    ("written", "milliseconds"),
    [
        (1500, 1500),
        ("1500", 1500),
        ("1500ms", 1500),
        ("1.5s", 1500),
        ("1.001s", 1001),
        ("30 s", 30_000),
        ("2m", 120_000),
        ("2min", 120_000),
        ("24h", 86_400_000),
        ("7d", 604_800_000),
        (timedelta(hours=24), 86_400_000),
        (timedelta(seconds=1, microseconds=999), 1000),
    ],
)
def test_duration_is_kept_in_milliseconds(written: Any, milliseconds: int) -> None:
    assert build(ProducerOptions, {"dedup_ttl": written}).dedup_ttl == milliseconds


@pytest.mark.parametrize("written", ["9" * 400, "9" * 400 + "d", "1" + "0" * 308 + "d"])
def test_duration_beyond_all_numbers_is_refused(written: str) -> None:
    with pytest.raises(OptionError, match="block_timeout expects"):
        build(ProducerOptions, {"block_timeout": written})


NO_NUMBERS = [2**70, 10**5000, -(2**70), float("nan"), float("inf"), True, "1e999", "9" * 30]


@pytest.mark.parametrize("cls", [ProducerOptions, ConsumerOptions, PromoterOptions, SchedulerOptions])
@pytest.mark.parametrize(
    "value", [2**70, 10**5000, -(2**70), float("nan"), float("inf"), True, "1e999", "9" * 30], ids=lambda value: ""
)
def test_no_number_is_taken_that_nothing_could_do_with(cls: type[Any], value: Any) -> None:
    for name, rule, kind, _ in described(cls):
        if kind in (int, float) or rule.duration:
            with pytest.raises(OptionError, match=f"{name} expects"):
                build(cls, {name: value})


def test_secrets_are_the_options_that_hold_credentials() -> None:
    declared = {f.name for f in dataclasses.fields(ProducerOptions) if f.metadata["rule"].secret}

    assert declared == set(SECRETS)


@pytest.mark.parametrize("name", SECRETS)
def test_secret_is_not_in_repr(name: str) -> None:
    assert "s3cret" not in repr(ProducerOptions(**{name: SECRETS[name]}))


@pytest.mark.parametrize("name", SECRETS)
def test_secret_is_not_in_repr_after_pickling(name: str) -> None:
    options = pickle.loads(pickle.dumps(ProducerOptions(**{name: SECRETS[name]})))

    assert getattr(options, name) == SECRETS[name]
    assert "s3cret" not in repr(options)


@pytest.mark.parametrize("name", SECRETS)
def test_bad_secret_is_not_in_the_error_nor_in_its_pickle(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        build(ProducerOptions, {name: ["s3cret"]})

    assert "not shown because it is secret" in str(caught.value)
    assert "s3cret" not in repr(caught.value) + str(vars(caught.value))
    assert b"s3cret" not in pickle.dumps(caught.value)


def test_value_of_an_unknown_option_is_not_in_the_error() -> None:
    with pytest.raises(OptionError) as caught:
        build(ProducerOptions, {"passwrd": "s3cret"})

    assert "s3cret" not in str(caught.value)


def test_options_pickle() -> None:
    options = ProducerOptions(queue="q", dedup_ttl="2h", **SECRETS)  # type: ignore[arg-type]

    assert pickle.loads(pickle.dumps(options)) == options


def test_options_cannot_be_changed() -> None:
    options = ProducerOptions()

    with pytest.raises(dataclasses.FrozenInstanceError):
        options.pool_size = 0  # type: ignore[misc]


def test_environment_gives_the_options_it_names_and_nothing_else() -> None:
    environ = {"CHASQUI_URL": "redis://h", "CHASQUI_POOL_SIZE": "3", "CHASQUI_OTHER": "x", "POOL_SIZE": "9"}

    assert from_environment(ConnectionOptions, environ) == {"url": "redis://h", "pool_size": "3"}


@pytest.mark.parametrize("spelling", ["python", "spark", "cli", "env", "toml"])
def test_table_lists_every_option_once_with_its_help(spelling: Spelling) -> None:
    rows = table(ProducerOptions, spelling).splitlines()[2:]

    declared = [(spell(f.name, spelling), f.metadata["rule"].help) for f in dataclasses.fields(ProducerOptions)]
    assert len(rows) == len(declared)
    for row, (name, meaning) in zip(rows, declared, strict=True):
        assert row.startswith(f"| `{name}` |")
        assert meaning in row


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("url", "|  |"),
        ("raw", "| `false` |"),
        ("max_stream_len", "| `1000000` |"),
        ("block_timeout", "| `30s` |"),
        ("dedup_ttl", "| `1d` |"),
        ("overflow", "One of `reject`, `block`, `trim`. |"),
    ],
)
def test_table_shows_defaults_and_choices(name: str, shown: str) -> None:
    (row,) = [row for row in table(ProducerOptions).splitlines() if row.startswith(f"| `{name}` |")]

    assert shown in row
