"""DDL of payloads, parsed without a JVM."""

from __future__ import annotations

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
    ],
)
def test_what_cannot_be_read_is_refused_by_the_options_name(ddl: str, why: str) -> None:
    with pytest.raises(OptionError, match=rf"payloadSchema expects columns.*({why})"):
        columns_of("payloadSchema", ddl)
