"""Checks the dashboard against Grafana's schemas, which are in the folder of the argument."""

import json
import sys
from pathlib import Path

from jsonschema import Draft7Validator

DASHBOARD = Path(__file__).parent.parent / "deploy/grafana/flechette.json"
SCHEMAS = Path(sys.argv[1])


def check(value, schema):
    errors = Draft7Validator(json.loads((SCHEMAS / schema).read_text())).iter_errors(value)
    for error in errors:
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


dashboard = json.loads(DASHBOARD.read_text())
problems = list(check(dashboard, "dashboard.json"))
for panel in dashboard["panels"]:
    if panel["type"] != "row":
        found = check(panel["options"], f"composable-{panel['type']}-panelcfg.json")
        problems.extend(f"{panel['title']}: options: {problem}" for problem in found)
ids = [panel["id"] for panel in dashboard["panels"]]
if len(ids) != len(set(ids)):
    problems.append("two panels have the same id")
print(f"dashboard: {len(ids)} panels, {len(problems)} problems", *problems, sep="\n")
sys.exit(bool(problems))
