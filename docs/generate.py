"""``make docs``: writes docs/options.md, conf/chasqui.toml and the tables of README.md from the declarations.

A test fails when one of them is stale.
"""

from __future__ import annotations

from pathlib import Path

from chasqui.options import (
    ConnectionOptions,
    ConsumerOptions,
    ProducerOptions,
    PromoterOptions,
    SchedulerOptions,
    Settling,
    described,
    table,
    toml,
)
from chasqui_spark.options import ReplayOptions, SettleOptions, SinkOptions, SourceOptions

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- options -->\n", "<!-- /options -->"

ROLES = {
    "Producer and AsyncProducer": ProducerOptions,
    "Consumer": ConsumerOptions,
    "Promoter": PromoterOptions,
    "Scheduler": SchedulerOptions,
}
SPARK = {
    "Spark: reading": SourceOptions,
    "Spark: writing": SinkOptions,
    "Spark: settling outcomes": SettleOptions,
    "Spark: replaying dead letters": ReplayOptions,
}
HEAD = """# Options

Made from the declarations in `engine/chasqui/options.py` and `chasqui_spark/options.py` by `make docs`. Those of the
engine are arguments: `Producer(url, queue="emails", max_stream_len=100_000)`. The same option is `maxStreamLen` for
Spark and, for `chasquictl` and the pipelines in `jobs/`, `--max-stream-len`, `CHASQUI_MAX_STREAM_LEN` in the
environment and `max_stream_len` in TOML. Programs and Spark read only `CHASQUI_URL` from the environment.

Options whose default has a unit (`30s`, `1d`) take text such as `500ms` or `24h`, or milliseconds; names that end in
`_ms` and `_secs` take whole numbers.
"""


def text() -> str:
    engine = "".join(f"\n## {title}\n\n{table(cls)}\n" for title, cls in ROLES.items())
    return HEAD + engine + "".join(f"\n## {title}\n\n{table(cls, 'spark')}\n" for title, cls in SPARK.items())


def readme(now: str) -> str:
    """The README with its option tables replaced: those of Spark, without what only says how to connect."""
    shared = {name for name, *_ in described(ConnectionOptions)} - {"url"}
    shared_settling = {name for name, *_ in described(Settling)} - {"group", "max_attempts", "claim_min_idle_ms"}
    reading = table(SourceOptions, "spark", skip=shared | shared_settling)
    writing = table(SinkOptions, "spark", skip=shared)
    before, _, rest = now.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}Reading:\n\n{reading}\n\nWriting:\n\n{writing}\n{END}{after}"


TABLES = {
    "producer": (ProducerOptions, "Whoever adds jobs: Producer, AsyncProducer, chasquictl."),
    "consumer": (ConsumerOptions, "Workers: Consumer, chasquictl work."),
    "promoter": (PromoterOptions, "A promoter of its own; workers have one inside."),
    "scheduler": (SchedulerOptions, "A scheduler of its own; workers have one inside."),
    "source": (SourceOptions, "Spark reads: jobs/ pass these on to spark.read and spark.readStream."),
    "sink": (SinkOptions, "Spark writes: jobs/ pass these on to df.write and df.writeStream."),
    "replay": (ReplayOptions, "Dead letters that go back: jobs/dlq_triage.py --replay."),
}
CONF_HEAD = """\
# Every option of these roles, set to its default and commented out. Made from the declarations by `make docs`.
# Used by `chasquictl --config FILE` (or CHASQUI_CONFIG=FILE) and by the pipelines in jobs/.
# A flag wins over the environment (CHASQUI_MAX_ATTEMPTS), that over this file, this over the default.
# Where the default is text such as "30s", so may the value be; names in _ms and _secs take whole numbers.
# A file with a password in its url is a secret. Options of Spark writes with settle=true are given in code only, and
# stand in docs/options.md.

# --- How to reach the server: for every role. ---

"""


def conf_text() -> str:
    """conf/chasqui.toml: the connection at the top, a table for each role with what it has beyond that."""
    shared = {name for name, *_ in described(ConnectionOptions)}
    parts = [CONF_HEAD + toml(ConnectionOptions) + "\n"]
    for name, (cls, about) in TABLES.items():
        own = toml(cls, skip=shared | {"replay_from"})  # that one says only which kind of write it is
        parts.append(f"\n\n# --- {about} ---\n[{name}]\n\n{own}\n")
    return "".join(parts)


if __name__ == "__main__":
    (ROOT / "conf" / "chasqui.toml").write_text(conf_text())
    (ROOT / "docs" / "options.md").write_text(text())
    (ROOT / "README.md").write_text(readme((ROOT / "README.md").read_text()))
