"""What Spark's parser makes of DDL: reading the file, and (run as a script, by hand) writing it.

Each case is a text and the JSON of the type that `DataType.fromDDL` gave, or null where it refused.
"""

from __future__ import annotations

import json
from pathlib import Path

VECTORS = Path(__file__).parent / "ddl_vectors.json"

_TYPES = """
boolean|tinyint|byte|smallint|short|int|integer|bigint|long|float|real|double|string|binary|date
timestamp|timestamp_ntz|timestamp_ltz|timestamp without time zone|timestamp with local time zone
timestamp with time zone|timestamp(3)|timestamp_ntz(3)|timestamp(6)|timestamp_ntz(6)
timestamp_ltz(6)|timestamp(9)|timestamp_ntz(9)|timestamp(6) without time zone
timestamp_ntz without time zone|variant|void|null|interval|object|INT|BigInt|VARIANT|time
time(0)|time(3)|time(6)|time(7)|time(9)|time ( 2 )|time without time zone
time(3) without time zone|time()|time(-1)|char(3)|character(3)|varchar(5)|char|varchar|char()
char(0)|varchar(0)|char(-1)|char(99999999999)|decimal|dec|numeric|decimal(5)|dec(5,2)
numeric(5,2)|decimal(38,38)|decimal(39)|decimal(39,1)|decimal(5,6)|decimal(0,0)|decimal(0)
decimal(5,-1)|decimal(5,)|decimal()|decimal(5,2,1)|decimal( 10 , 2 )|decimal(010,02)
decimal(5.0)|decimal(5L)|interval day|interval hour|interval minute|interval second
interval year|interval month|interval day to hour|interval day to minute|interval day to second
interval hour to minute|interval hour to second|interval minute to second|interval year to month
interval day to day|interval second to day|interval month to year|interval day to month
interval year to day|interval days|INTERVAL Day TO Second|interval hour to day
interval year to year|interval week|string collate UTF8_BINARY|string collate UTF8_LCASE
string collate utf8_lcase|string collate unicode|string collate UNICODE_CI
string collate unicode_ci_ai|string collate UNICODE_AI|string collate de|string collate en_CI
string collate EN_ci|string collate xx_yy_zz|string collate UTF8_CI|string collate
string collate UTF8_BINARY_RTRIM|string collate UTF8_LCASE_RTRIM|string collate UNICODE_CI_RTRIM
string collate `UNICODE`|string collate sr_Cyrl_SRB|string collate de_AT|string collate de_DEU
string collate de_AUT|string collate nosuch|string collate UNICODE_RTRIM_CI
string collate UNICODE_AI_CI|string collate 'UNICODE'|char(3) collate UNICODE
int collate UNICODE|string(3)|binary(3)|int(3)|geometry|geography|geometry(0)|geometry(4326)
geometry(3857)|geometry(any)|geometry(ANY)|geography(4326)|geography(any)|geography(0)
geometry(17)|geometry(-1)|geometry()|array<int>|ARRAY<INT>|array < int >|array<>|array
array<int,int>|array<int|array int|array<array<int>>|array<array<array<int>>>|map<string,int>
map<string, array<map<int, date>>>|map<string>|map<>|map|map<map<int,int>,int>|struct<a:int>
struct<a int>|struct<a: int, b string>|struct<>|struct< >|struct|struct<a:int,>|struct<a>
struct<:int>|struct<a:int not null>|struct<a int not null comment 'x'>
struct<a:int comment 'x' not null>|struct<`a b`:int>|struct<a:struct<b:struct<c:int>>>
struct<a:int b:int>|array<int not null>|map<string, int not null>
array<struct<a: decimal(5,2) NOT NULL>>|struct<1a:int>|array<string collate UNICODE>
map<string collate UTF8_LCASE, char(4)>|struct<array: array<int>>
"""
_TABLES = [
    "",
    " ",
    ",",
    "a",
    "a b",
    "a int",
    " a  int ",
    "a\nint\t",
    "a\u00a0int",
    "a\u3000int",
    "a int, b string",
    "a: int, b: string",
    "a: int, b string",
    "a int, b: string",
    "a:int",
    "a :int",
    "a::int",
    "a int,",
    ",a int",
    "a int b int",
    "a int; b int",
    "a, b",
    "a int, a int",
    "a int, A string",
    "A Int, bB STRING",
    "`a` int",
    "`a b` int",
    "`a``b` int",
    "```a` int",
    "`` int",
    "`a int",
    "a` int",
    "`a`int",
    "a `int`",
    "`ü` int",
    "ü int",
    "日本 int",
    "a-b int",
    "a.b int",
    "a$ int",
    "_ int",
    "_a int",
    "1 int",
    "1a int",
    "1L int",
    "1e5 int",
    "1e5x int",
    "5d int",
    "1bd int",
    "1_ int",
    "int int",
    "date date, timestamp timestamp, time time",
    "interval int",
    "interval day",
    "interval interval day",
    "day interval",
    "array array<int>",
    "map map<int,int>, struct struct<a int>",
    "select int, from string, table date",
    "not int",
    "null int",
    "not int not null",
    "comment string comment 'x'",
    "default int",
    "collate string collate UNICODE",
    "left int, right int, full int, join int, on int, using int, union int",
    "a int not null",
    "a int NOT NULL",
    "a int null",
    "a int not",
    "a: int not null",
    "a int comment 'x'",
    'a int comment "x"',
    "a int COMMENT 'it''s'",
    'a int comment "say ""hi"""',
    "a int comment 'a\"b'",
    "a int comment 'a''''b'",
    r"a int comment 'it\'s \\ \n\t\r\b\0\Z end'",
    r"a int comment '\%\_\a\x'",
    r"a int comment '\u00e9\U0001F600\101\1\10'",
    r"a int comment '\u00G9'",
    "a int comment r'x\\n'",
    "a int comment ''",
    "a int comment 'x' 'y'",
    "a int comment x",
    "a int comment",
    "a int comment 'x",
    "a int comment 'x' not null",
    "a int not null comment 'x'",
    "a int comment 'x' comment 'y'",
    "a int default 5",
    "a int not null default 5",
    "a int generated always as (1)",
    "a int primary key",
    "a int -- rest\n, b int",
    "a int -- rest",
    "a /* b */ int",
    "a /* b /* c */ */ int",
    "a /* b int",
    "a /**/ int",
    "/* x */",
    "a array<int> not null comment 'x', b map<string, struct<c: int>>",
    "a string collate UTF8_LCASE not null",
    "a decimal(5,2), b decimal(38, 0)",
    "a timestamp without time zone, b int",
    "a interval day to second, b interval year",
    "a array<array<int>>,b int",
    "a array<int>> ",
    "a int)",
    "(a int)",
    "a int\0",
    "create table t (a int)",
    "struct<a int>, b int",
    "a struct<b: int, c: string>",
    "a udt",
    "a unknown",
    "a unknown(3)",
    "identifier('a') int",
    "a `array`<int>",
    "a void",
    "a variant, b geometry(4326)",
    "a char(3), b varchar(4)",
    "a time(3), b time",
]


def texts() -> list[str]:
    """Every text, bare types also as the type of a column."""
    bare = [text for line in _TYPES.strip().split("\n") for text in line.split("|")]
    return [*bare, *(f"x {text}" for text in bare), *_TABLES]


def load() -> list[tuple[str, str | None]]:
    """The recorded answers."""
    return [(case["ddl"], case["json"]) for case in json.loads(VECTORS.read_text())["cases"]]


def generate() -> None:
    """Write the file from the Spark that is installed."""
    from pyspark.sql import SparkSession
    from pyspark.sql.types import DataType

    spark = (
        SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    )
    lines = []
    for text in texts():
        try:
            answer = DataType.fromDDL(text).json()
        except Exception:  # Spark throws whatever its parser stumbles over
            answer = None
        lines.append(json.dumps({"ddl": text, "json": answer}, ensure_ascii=False))
    head = f'{{"source": "Apache Spark {spark.version}, DataType.fromDDL", "cases": [\n'
    VECTORS.write_text(head + ",\n".join(lines) + "\n]}\n")
    spark.stop()


if __name__ == "__main__":
    generate()
