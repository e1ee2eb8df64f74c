"""Each alert fires where it should, and a job that is well raises none; promtool is the judge."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from statebackend.monitoring.shipped_files import RULES
from tests.support.prometheus import require

pytestmark = pytest.mark.prometheus

Series = dict[str, str]
JOB = {"job_name": "j"}
OPERATOR = {"job_name": "j", "operator": "count"}

# alert: what Prometheus has scraped, one value an interval; how long an interval is; when the alert
# is there; its labels. The notation is promtool's: 0+5x60 is 0, 5, 10, ... 300.
FIRES: dict[str, tuple[Series, str, str, dict[str, str]]] = {
    "StatebackendJobDown": (
        {"job_running{J}": "1 1 0x10", "job_fenced{J}": "0x12"},
        "1m",
        "5m",
        {**JOB, "severity": "critical"},
    ),
    "StatebackendJobFenced": (
        {"job_running{J}": "1 0x5", "job_fenced{J}": "0 1x5"},
        "1m",
        "5m",
        {**JOB, "severity": "warning"},
    ),
    "StatebackendNoMetrics": (
        {"job_running{J}": "1 1 stale"},
        "1m",
        "10m",
        {"severity": "critical"},
    ),
    "StatebackendStoreUnreachable": (
        {"store_unreachable_seconds{J}": "0 0 31", "commit_waiting_seconds{J}": "0 0 31"},
        "1m",
        "2m",
        {**JOB, "severity": "warning"},
    ),
    "StatebackendEpochStuck": (
        {
            "last_commit_timestamp_seconds{J}": "60x20",
            "epoch{J}": "8x20",
            "durable_epoch{O}": "7x20",
            "job_running{J}": "1x20",
        },
        "1m",
        "10m",
        {**JOB, "severity": "critical"},
    ),
    "StatebackendEpochsSlow": (
        {
            "epoch_duration_seconds_sum{O}": "0+36x20",
            "epoch_duration_seconds_count{O}": "0+6x20",
        },
        "1m",
        "15m",
        {**OPERATOR, "severity": "warning"},
    ),
    "StatebackendCommitsSlow": (
        {
            "commit_duration_seconds_sum{O}": "0+9x20",
            "commit_duration_seconds_count{O}": "0+6x20",
        },
        "1m",
        "15m",
        {**JOB, "severity": "warning"},
    ),
    "StatebackendStoreErrors": (
        {
            'store_request_errors_total{J,place="driver",verb="put"}': "0+2x40",
            'store_requests_total{J,place="driver",verb="put"}': "0+10x40",
        },
        "1m",
        "30m",
        {**JOB, "severity": "warning"},
    ),
    "StatebackendSkew": (
        {
            'subtask_duration_seconds{O,stat="max"}': "6x20",
            'subtask_duration_seconds{O,stat="p50"}': "1x20",
        },
        "1m",
        "15m",
        {**OPERATOR, "severity": "info"},
    ),
    "StatebackendRestoredFromStore": (
        {
            'restores_total{O,source="durable"}': "0x80 2x30",
            "generation{J}": "3x110",
        },
        "1m",
        "90m",
        {**JOB, "severity": "warning"},
    ),
    "StatebackendWritesSlowDown": (
        {"level0_files{O}": "21x20"},
        "1m",
        "10m",
        {**OPERATOR, "severity": "warning"},
    ),
    "StatebackendInputSpills": (
        {"input_spilled_bytes_total{O}": "0+1000x30"},
        "1m",
        "25m",
        {**OPERATOR, "severity": "info"},
    ),
    "StatebackendLateRows": (
        {"late_rows_total{O}": "0+2x30", "rows_total{O}": "0+100x30"},
        "1m",
        "25m",
        {**OPERATOR, "severity": "warning"},
    ),
    "StatebackendWatermarkStuck": (
        {"watermark_timestamp_seconds{J}": "7x40", "rows_total{O}": "0+100x40"},
        "1m",
        "30m",
        {**JOB, "severity": "warning"},
    ),
    "StatebackendNoFullCopies": (
        {
            "bases_recorded_total{O}": "4x200",
            "epoch_duration_seconds_count{O}": "0+6x200",
            "state_bytes{O}": "1000000x200",
        },
        "1m",
        "190m",
        {**OPERATOR, "severity": "warning"},
    ),
    "StatebackendStateGrows": (
        {"state_bytes{O}": "1000000000x100 4000000000x100"},
        "1h",
        "180h",
        {**OPERATOR, "severity": "info"},
    ),
    "StatebackendCheckpointsFail": (
        {
            'checkpoints_total{J,outcome="expired"}': "0+1x20",
            'checkpoints_total{J,outcome="complete"}': "9x20",
        },
        "1m",
        "15m",
        {**JOB, "severity": "critical"},
    ),
    "StatebackendCheckpointsSlow": (
        {
            "checkpoint_duration_seconds_sum{J}": "0+22x20",
            "checkpoint_duration_seconds_count{J}": "0+2x20",
        },
        "1m",
        "15m",
        {**JOB, "severity": "warning"},
    ),
    "StatebackendRestartsOften": (
        {"restarts_total{J}": "0x10 0+1x20"},
        "1m",
        "30m",
        {**JOB, "severity": "critical"},
    ),
}
# A query whose batches of 10 s take 1 s, and a continuous job, both for three hours.
WELL: Series = {
    "job_running{J}": "1x200",
    "job_fenced{J}": "0x200",
    "job_failed{J}": "0x200",
    "generation{J}": "3x200",
    "epoch{J}": "6+6x200",
    "durable_epoch{O}": "5+6x200",
    "last_commit_timestamp_seconds{J}": "0+60x200",
    "commit_waiting_seconds{J}": "0.1x200",
    "store_unreachable_seconds{J}": "0x200",
    "restarts_total{J}": "0x200",
    "epoch_duration_seconds_sum{O}": "0+6x200",
    "epoch_duration_seconds_count{O}": "0+6x200",
    "commit_duration_seconds_sum{O}": "0+0.3x200",
    "commit_duration_seconds_count{O}": "0+6x200",
    'store_request_errors_total{J,place="driver",verb="put"}': "0x200",
    'store_requests_total{J,place="driver",verb="put"}': "0+60x200",
    'subtask_duration_seconds{O,stat="max"}': "1.2x200",
    'subtask_duration_seconds{O,stat="p50"}': "1x200",
    'restores_total{O,source="durable"}': "0 0 8x200",
    "level0_files{O}": "4x200",
    "input_spilled_bytes_total{O}": "0x200",
    "late_rows_total{O}": "0+1x200",
    "rows_total{O}": "0+1000x200",
    "watermark_timestamp_seconds{J}": "0+60x200",
    "bases_recorded_total{O}": "0+1x200",
    "state_bytes{O}": "1000000000+1000x200",
    'checkpoints_total{J,outcome="expired"}': "0x100 1x100",
    'checkpoints_total{J,outcome="complete"}': "0+6x200",
    "checkpoint_duration_seconds_sum{J}": "0+6x200",
    "checkpoint_duration_seconds_count{J}": "0+6x200",
}


def rules() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def promtool(*words: str) -> None:
    require("promtool")
    ended = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def full(selector: str) -> str:
    named = selector.replace("O}", 'J,operator="count"}').replace("O,", 'J,operator="count",')
    return "statebackend_" + re.sub(r"\bJ\b", 'job_name="j"', named)


def expect(
    folder: Path, series: Series, interval: str, at: str, wanted: dict[str, list[dict[str, Any]]]
) -> None:
    """promtool: these alerts are there at that time, with these labels and texts, and no others."""

    test = {
        "interval": interval,
        "input_series": [{"series": full(one), "values": of} for one, of in series.items()],
        "alert_rule_test": [
            {"eval_time": at, "alertname": name, "exp_alerts": alerts}
            for name, alerts in wanted.items()
        ],
    }
    made = {"rule_files": [str(RULES)], "evaluation_interval": interval, "tests": [test]}
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump(made), encoding="utf-8")
    promtool("test", "rules", str(path))


def test_prometheus_takes_the_rules() -> None:
    promtool("check", "rules", str(RULES))


@pytest.mark.parametrize("name", rules())
def test_an_alert_fires_where_it_should(name: str, tmp_path: Path) -> None:
    series, interval, at, labels = FIRES[name]
    annotations = {
        key: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
        for key, text in rules()[name]["annotations"].items()
    }
    alert = {"exp_labels": labels, "exp_annotations": annotations}
    expect(tmp_path, series, interval, at, {name: [alert]})


@pytest.mark.parametrize("at", ["20m", "100m", "190m"])
def test_a_job_that_is_well_raises_no_alert(at: str, tmp_path: Path) -> None:
    expect(tmp_path, WELL, "1m", at, {name: [] for name in rules()})


def test_a_driver_that_was_taken_over_and_still_shows_its_metrics_spoils_no_alert(
    tmp_path: Path,
) -> None:
    # Each of a pair of series would match two of the other side, which Prometheus refuses.
    both = {
        f'{selector[:-1]},instance="{instance}"}}': values
        for instance in ("old", "new")
        for selector, values in WELL.items()
    }
    both['job_running{J,instance="old"}'] = "0x200"
    both['job_fenced{J,instance="old"}'] = "1x200"
    both['generation{J,instance="old"}'] = "2x200"
    labels = {**JOB, "instance": "old", "severity": "warning"}
    summary = "Another driver has taken over job j"
    fenced = {"exp_labels": labels, "exp_annotations": {"summary": summary}}
    wanted = {name: [fenced] if name == "StatebackendJobFenced" else [] for name in rules()}
    expect(tmp_path, both, "1m", "100m", wanted)
