"""Writes docs/options.md from the declarations: ``make docs``. A test fails when the file is stale."""

from __future__ import annotations

from pathlib import Path

from chasqui.options import ConsumerOptions, ProducerOptions, PromoterOptions, SchedulerOptions, table

ROLES = {
    "Producer and AsyncProducer": ProducerOptions,
    "Consumer": ConsumerOptions,
    "Promoter": PromoterOptions,
    "Scheduler": SchedulerOptions,
}
HEAD = """# Options

Made from the declarations in `engine/chasqui/options.py` by `make docs`. Options are keyword arguments:
`Producer(url, queue="emails", max_stream_len=100_000)`. The same option is `maxStreamLen` for Spark,
`--max-stream-len` on a command line, `CHASQUI_MAX_STREAM_LEN` in the environment and `max_stream_len` in TOML.
Durations take milliseconds, a `timedelta`, or text such as `500ms`, `30s`, `24h`.
"""


def text() -> str:
    return HEAD + "".join(f"\n## {title}\n\n{table(cls)}\n" for title, cls in ROLES.items())


if __name__ == "__main__":
    Path(__file__).with_name("options.md").write_text(text())
