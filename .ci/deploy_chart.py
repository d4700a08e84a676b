"""Checks the Helm chart: lint, and the rendered objects against the schemas of Kubernetes. Writes the settings file that
the chart makes of the values to the path of the argument."""

import sys
from pathlib import Path

import kubernetes_validate
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError

CHART = Path(__file__).parent.parent / "deploy/helm/flechette"
VERSIONS = ["1.25", "1.37"]

IMAGE = {"repository": "registry.example/flechette"}
REQUIRED = {"image": IMAGE, "models": {"claim": "models"}}
EVERYTHING = {
    "image": IMAGE,
    "imagePullSecrets": [{"name": "registry"}],
    "models": {"init": {"image": "registry.example/rclone:1.70", "args": ["copy", "bucket:models", "/models"]}},
    "settings": {"tls": {"http": "on", "certificate": "/secrets/a.pem", "key": "/secrets/a.key"}, "cache": {"mode": "on", "fraction": 0.05}, "server": {"drain_seconds": 5}},
    "secret": "flechette",
    "env": [{"name": "FLECHETTE_LOG_LEVEL", "value": "debug"}],
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "authorization": {"name": "a", "key": "b"}},
    "networkPolicy": {"enabled": True, "from": [{"podSelector": {"matchLabels": {"app": "ads"}}}]},
    "gpus": 1,
    "podLabels": {"team": "ads"},
    "podAnnotations": {"note": "x"},
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
    ],
    "priorityClassName": "high",
}
CASES = {
    "required values only": REQUIRED,
    "every value": EVERYTHING,
    "a network policy without an init container": {**REQUIRED, "networkPolicy": {"enabled": True}},
}
# Values that must be refused, and words of the error.
REFUSED = [
    ({}, "minLength"),
    ({"image": IMAGE}, "models.claim or models.init"),
    ({**REQUIRED, "replica": 3}, "replica"),
    ({**REQUIRED, "settings": {"server": {"drain_seconds": "soon"}}}, "drain_seconds"),
]


def objects(values):
    chart = Chart.load(CHART)
    chart.validate_schema(values)
    manifests = chart.render(values, name="ctr", namespace="ads")
    texts = [text for path, text in manifests.items() if not path.endswith(".txt")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def main():
    report = lint(CHART, CASES["required values only"], strict=True)
    problems = [message for message in report["messages"] if message["severity"] > 1]
    assert not problems and not report["errors"], report
    for case, values in CASES.items():
        found = objects(values)
        # The schemas of Kubernetes do not have objects of operators.
        known = [document for document in found if not document["apiVersion"].startswith("monitoring.coreos.com/")]
        for document in known:
            for version in VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)
        print(f"{case}: {len(found)} objects, {len(known)} checked for Kubernetes {', '.join(VERSIONS)}")
    for values, words in REFUSED:
        try:
            objects(values)
        except HelmError as error:
            assert words in str(error), f"{values}: {error}"
        else:
            raise AssertionError(f"not refused: {values}")
    configs = [document for document in objects(EVERYTHING) if document["kind"] == "ConfigMap"]
    Path(sys.argv[1]).write_text(configs[0]["data"]["flechette.toml"])


main()
