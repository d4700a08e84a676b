"""Checks the rule for prometheus-adapter in docs/operations.md with promtool: the values that the autoscaler of the
Helm chart gets for busy, idle and loading servers."""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
RULES = ROOT / "deploy/prometheus/flechette.rules.yml"


def series(name, pod, values, **labels):
    labels = {"namespace": "ads", "pod": pod, **labels}
    pairs = ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
    return {"series": f"{name}{{{pairs}}}", "values": values}


# Two models of a busy server, whose requests wait 4 and 8 ms; an idle server; one that loads its models.
INPUT = [
    series("flechette_ready", "busy", "1x10"),
    series("flechette_queue_seconds_sum", "busy", "0+0.48x10", model="a"),
    series("flechette_queue_seconds_count", "busy", "0+120x10", model="a"),
    series("flechette_queue_seconds_sum", "busy", "0+0.96x10", model="b"),
    series("flechette_queue_seconds_count", "busy", "0+120x10", model="b"),
    series("flechette_ready", "idle", "1x10"),
    series("flechette_queue_seconds_sum", "idle", "7x10", model="a"),
    series("flechette_queue_seconds_count", "idle", "900x10", model="a"),
    series("flechette_ready", "loading", "0x10"),
]
# Without values the autoscaler changes nothing. A server that loads must not count as idle, so it has none.
EXPECTED = {"busy": 0.008, "idle": 0}

page = (ROOT / "docs/operations.md").read_text()
[rule] = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.S) if "seriesQuery" in block]
[rule] = rule["rules"]
# The adapter learns of pods by these series, so they must always be there.
name = re.fullmatch(r"(\w+)\{.*\}", rule["seriesQuery"])[1]
assert name == "flechette_ready", rule["seriesQuery"]
template = (ROOT / "deploy/helm/flechette/templates/autoscaler.yaml").read_text()
assert f"metric: {{name: {rule['name']['as']}}}" in template, rule["name"]

query = rule["metricsQuery"]
parts = {"Series": name, "GroupBy": "pod", "LabelMatchers": 'namespace="ads",pod=~"busy|idle|loading"'}
for part, text in parts.items():
    query = query.replace(f"<<.{part}>>", text)
samples = [{"labels": f'{{pod="{pod}"}}', "value": value} for pod, value in EXPECTED.items()]
test = {
    "rule_files": [str(RULES.resolve())],
    "evaluation_interval": "15s",
    "tests": [
        {
            "interval": "15s",
            "input_series": INPUT,
            "promql_expr_test": [{"expr": query, "eval_time": "2m", "exp_samples": samples}],
        }
    ],
}
with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
    yaml.safe_dump(test, file)
    file.flush()
    subprocess.run(["promtool", "test", "rules", file.name], check=True)
