"""A DDL of columns -> Spark's types, in plain Python: planning processes have no JVM that could parse it."""

from __future__ import annotations

import re
from collections.abc import Callable

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from chasqui import OptionError

_SIMPLE: dict[str, Callable[[], DataType]] = {
    "boolean": BooleanType,
    "tinyint": ByteType,
    "byte": ByteType,
    "smallint": ShortType,
    "short": ShortType,
    "int": IntegerType,
    "integer": IntegerType,
    "bigint": LongType,
    "long": LongType,
    "float": FloatType,
    "real": FloatType,
    "double": DoubleType,
    "string": StringType,
    "binary": BinaryType,
    "date": DateType,
    "timestamp": TimestampType,
    "timestamp_ltz": TimestampType,
    "timestamp_ntz": TimestampNTZType,
}
_KNOWN = "boolean, tinyint, smallint, int, bigint, float, double, decimal(p,s), string, binary, date, timestamp, \
timestamp_ntz, array<>, map<,> and struct<>"
_TOKEN = re.compile(
    r"""\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<word>\w+)|(?P<sign>[<>(),:])"""
    r"""|(?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*"))""",
    re.ASCII | re.DOTALL,
)
_DEPTH = 32


def columns_of(option: str, ddl: str) -> StructType:
    """The struct that a DDL such as ``to STRING, n INT NOT NULL, tags ARRAY<STRING>`` declares."""
    return _Parser(option, ddl).whole()


class _Parser:
    def __init__(self, option: str, ddl: str) -> None:
        self.option, self.ddl, self.at = option, ddl, 0
        self.tokens: list[str] = []
        place, end = 0, len(ddl.rstrip())
        while place < end:
            match = _TOKEN.match(ddl, place)
            if match is None:
                came = ddl[place : place + 40].strip()[:20]
                raise self._bad(
                    f"{came!r} cannot be read; names of more than letters, digits and _ stand in `backquotes`"
                )
            self.tokens.append(match[0].strip())
            place = match.end()

    def whole(self) -> StructType:
        if not self.tokens:
            raise self._bad("it is empty")
        if self._peek() == "struct":
            self.at += 1
            self._take("<")
            fields = self._fields(">", 1)
            self._take(">")
        else:
            fields = self._fields("", 1)
        if self.at != len(self.tokens):
            raise self._bad(f"{self.tokens[self.at]!r} is too much")
        return fields

    def _fields(self, end: str, depth: int) -> StructType:
        fields: dict[str, StructField] = {}
        while self._peek() != end:
            if fields:
                self._take(",")
            name = self._name()
            if self._peek() == ":":
                self.at += 1
            kind = self._type(depth)
            nullable = True
            if self._peek() == "not":
                self.at += 1
                self._take("null")
                nullable = False
            if self._peek() == "comment":
                self.at += 1
                if not self._peek().startswith(("'", '"')):
                    raise self._bad(f"the text of a comment is expected in quotes, not {self._peek() or 'the end'!r}")
                self.at += 1
            if name in fields:
                raise self._bad(f"the column {name!r} stands twice")
            fields[name] = StructField(name, kind, nullable)
        if not fields:
            raise self._bad("a struct without columns")
        return StructType(list(fields.values()))

    def _type(self, depth: int) -> DataType:
        if depth > _DEPTH:
            raise self._bad(f"nested deeper than {_DEPTH}")
        word = self._peek()
        self.at += 1
        if word in _SIMPLE:
            return _SIMPLE[word]()
        if word in ("decimal", "dec", "numeric"):
            return self._decimal()
        if word == "array":
            self._take("<")
            element = self._type(depth + 1)
            self._take(">")
            return ArrayType(element)
        if word == "map":
            self._take("<")
            key = self._type(depth + 1)
            if isinstance(key, MapType | ArrayType | StructType):
                raise self._bad("keys of a map are plain values")
            self._take(",")
            value = self._type(depth + 1)
            self._take(">")
            return MapType(key, value)
        if word == "struct":
            self._take("<")
            fields = self._fields(">", depth + 1)
            self._take(">")
            return fields
        raise self._bad(
            f"{word!r} is no type that a payload can have; known are {_KNOWN}" if word else "a type is missing"
        )

    def _decimal(self) -> DecimalType:
        if self._peek() != "(":
            return DecimalType(10, 0)
        self.at += 1
        precision, scale = self._number(), 0
        if self._peek() == ",":
            self.at += 1
            scale = self._number()
        self._take(")")
        if not 1 <= precision <= 38 or scale > precision:
            raise self._bad(f"decimal({precision},{scale}): precision is 1 to 38, the scale at most that")
        return DecimalType(precision, scale)

    def _number(self) -> int:
        word = self._peek()
        if not word.isdecimal() or len(word) > 4:
            raise self._bad(f"a number is expected, not {word!r}")
        self.at += 1
        return int(word)

    def _name(self) -> str:
        if self.at >= len(self.tokens):
            raise self._bad("a column's name is missing at the end")
        token = self.tokens[self.at]
        self.at += 1
        if token.startswith("`"):
            return token[1:-1].replace("``", "`")
        if not (token[0].isalnum() or token[0] == "_"):
            raise self._bad(f"a column's name is expected, not {token!r}")
        return token

    def _peek(self) -> str:
        return self.tokens[self.at].lower() if self.at < len(self.tokens) else ""

    def _take(self, wanted: str) -> None:
        if self._peek() != wanted:
            raise self._bad(f"{wanted!r} is expected, not {self._peek() or 'the end'!r}")
        self.at += 1

    def _bad(self, why: str) -> OptionError:
        return OptionError(
            f"{self.option} expects columns as in CREATE TABLE, such as `to STRING, n INT`; "
            f"got {self.ddl!r:.120}: {why}"
        )
