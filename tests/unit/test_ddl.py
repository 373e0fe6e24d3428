"""DDL of payloads, parsed without a JVM."""

from __future__ import annotations

import random
import time
from contextlib import suppress

import pytest
from pyspark.sql.types import StructType

from chasqui import OptionError
from chasqui_spark.ddl import columns_of


@pytest.mark.parametrize(
    ("ddl", "simple"),
    [
        ("to STRING, n INT", "struct<to:string,n:int>"),
        ("struct<to: string, n: bigint>", "struct<to:string,n:bigint>"),
        (" a  decimal , b DECIMAL(5), c dec(7,3) ", "struct<a:decimal(10,0),b:decimal(5,0),c:decimal(7,3)>"),
        (
            "m MAP<STRING, ARRAY<STRUCT<x: INT, y: TIMESTAMP_NTZ>>>",
            "struct<m:map<string,array<struct<x:int,y:timestamp_ntz>>>>",
        ),
        ("`odd name` int, `a``b` date, array int", "struct<odd name:int,a`b:date,array:int>"),
        ("a int COMMENT 'what it is', b real", "struct<a:int,b:float>"),
        ("a int NOT NULL COMMENT 'it''s, \\'so\\'', b int comment \"a\nb\"", "struct<a:int,b:int>"),
        ("a STRUCT<x: INT NOT NULL COMMENT 'c', `y z`: DECIMAL(38, 18)>", "struct<a:struct<x:int,y z:decimal(38,18)>>"),
        ("comment int, not int", "struct<comment:int,not:int>"),
    ],
)
def test_columns_as_in_create_table(ddl: str, simple: str) -> None:
    found = columns_of("payloadSchema", ddl)

    assert isinstance(found, StructType)
    assert found.simpleString() == simple


def test_not_null_is_kept() -> None:
    found = columns_of("payloadSchema", "a int not null, b int")

    assert [field.nullable for field in found] == [False, True]


@pytest.mark.parametrize(
    ("ddl", "why"),
    [
        ("", "it is empty"),
        ("a", "a type is missing"),
        ("a int,", "a column's name is missing"),
        ("a nope", "'nope' is no type"),
        ("a interval", "'interval' is no type"),
        ("a int b int", "',' is expected, not 'b'"),
        ("a array<int", "'>' is expected, not 'the end'"),
        ("a array<int>>", "'>' is expected|',' is expected"),
        ("a decimal(39,0)", "precision is 1 to 38"),
        ("a decimal(5,6)", "the scale at most that"),
        ("a decimal(x)", "a number is expected"),
        ("a map<array<int>, int>", "keys of a map are plain values"),
        ("a int, a string", "'a' stands twice"),
        ("a int; drop", "cannot be read"),
        ("a " + "array<" * 40 + "int" + ">" * 40, "nested deeper than"),
        ("struct<>", "a struct without columns"),
        ("a INTERVAL DAY TO SECOND", "'interval' is no type"),
        ("a int comment", "in quotes, not 'the end'"),
        ("a int comment b int", "in quotes, not 'b'"),
        ("struct<my-col:int>", "'-col:int>' cannot be read; names .* stand in `backquotes`"),
    ],
)
def test_what_cannot_be_read_is_refused_by_the_options_name(ddl: str, why: str) -> None:
    with pytest.raises(OptionError, match=rf"payloadSchema expects columns.*({why})"):
        columns_of("payloadSchema", ddl)


def test_any_text_is_read_or_refused_in_no_time() -> None:
    words = ["a", "int", "struct", "array", "map", "decimal", "not", "null", "comment", "'x'", "`q`", "5"]
    words += ["<", ">", ",", ":", "(", ")", "'", '"', "`", "\\", "ñ", " ", "\n"]
    chance = random.Random(7)
    begin = time.monotonic()
    for _ in range(20_000):
        with suppress(OptionError):
            columns_of("payloadSchema", " ".join(chance.choices(words, k=chance.randint(1, 12))))
    with pytest.raises(OptionError):
        columns_of("payloadSchema", "a int comment '" + "''" * 500_000)
    assert len(columns_of("payloadSchema", ", ".join(f"c{i} int" for i in range(20_000)))) == 20_000
    assert time.monotonic() - begin < 30
