"""Checks the Helm chart: lint, the rendered objects against the schemas of Kubernetes, and what they say. Writes the
settings file that the chart makes of the values of each case to the folder of the argument."""

import functools
import sys
import tempfile
import tomllib
from pathlib import Path

import kubernetes_validate
import yaml
from deploy_cases import CASES, REFUSED, REQUIRED
from helm_python.chart import Chart, lint, package
from helm_python.errors import HelmError

DEPLOY = Path(__file__).parent.parent / "deploy"
CHART = DEPLOY / "helm/flechette"
RULES = DEPLOY / "prometheus/flechette.rules.yml"
VERSIONS = ["1.25", "1.37"]
DNS = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}


# Once, because Helm prints a line for each symbolic link that it follows.
load = functools.cache(Chart.load)


def objects(values, path=CHART):
    """The rendered objects by kind. The Service without an address is HeadlessService."""
    chart = load(path)
    chart.validate_schema(values)
    manifests = chart.render(values, name="ctr", namespace="ads")
    texts = [text for path, text in manifests.items() if not path.endswith(".txt")]
    found = {}
    for document in (document for text in texts for document in yaml.safe_load_all(text) if document):
        headless = document["spec"].get("clusterIP") == "None" if document["kind"] == "Service" else False
        kind = "Headless" * headless + document["kind"]
        assert kind not in found, f"two objects {kind}"
        found[kind] = document
    return found


def settings(found):
    return found["ConfigMap"]["data"]["flechette.toml"]


def check_settings(found, values):
    """Every setting of the values is in the file, with its value."""
    parsed = tomllib.loads(settings(found))
    for section, expected in values.get("settings", {}).items():
        written = {key: parsed[section].get(key) for key in expected}
        assert written == expected, f"{section}: {written} instead of {expected}"


def check_tls(found, values):
    tls = values.get("settings", {}).get("tls", {})
    scheme = "https" if tls.get("http") == "on" else "http"
    grpc, http = found["Service"]["spec"]["ports"]
    assert grpc["appProtocol"] == ("https" if "certificate" in tls else "kubernetes.io/h2c"), grpc
    assert http["appProtocol"] == scheme, http
    container = found["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    for probe in ["readinessProbe", "livenessProbe"]:
        assert container[probe]["httpGet"]["scheme"] == scheme.upper(), container[probe]
    if "ServiceMonitor" in found:
        endpoint = found["ServiceMonitor"]["spec"]["endpoints"][0]
        assert endpoint.get("scheme", "http") == scheme, endpoint
        own = values["serviceMonitor"].get("tlsConfig", {})
        tls_config = {"serverName": "ctr.ads.svc", **own} if scheme == "https" else None
        assert endpoint.get("tlsConfig") == tls_config, endpoint


def check_ports(found):
    """The ports of the container are those that the program listens on, and the others go there by their names."""
    server = tomllib.loads(settings(found))["server"]
    pod = found["Deployment"]["spec"]["template"]["spec"]
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert ports == {name: int(server[name].rsplit(":", 1)[1]) for name in ["grpc", "http"]}, ports
    # Flags win over the environment of the image.
    for name in ["models", "grpc", "http"]:
        assert f"--{name}={server[name]}" in pod["containers"][0]["args"], pod["containers"][0]["args"]
    for kind in ["Service", "HeadlessService"]:
        for port in found[kind]["spec"]["ports"]:
            assert port["targetPort"] in ports, port


def check_disruption_budget(found, values):
    """It has one of the two numbers, that of the values."""
    written = {key: value for key, value in found["PodDisruptionBudget"]["spec"].items() if key != "selector"}
    assert written == values.get("disruptionBudget", {"maxUnavailable": 1}), written


def check_network_policies():
    """The connections that pods may open. Without the policy type Egress these are all."""
    ports = [
        ("http://collector:4317", 4317),
        ("https://collector.example/", 443),
        ("http://[fd00::1]", 80),
        ("https://[fd00::1]:4318/path", 4318),
    ]
    init = {"init": {"image": "registry.example/rclone:1.70"}}
    other = {"ports": [{"port": 55680, "protocol": "TCP"}]}
    cases = [({}, []), ({"models": init}, None), ({"models": init, "networkPolicy": {"egress": [other]}}, [DNS, other])]
    for endpoint, port in ports:
        to_collector = {"ports": [{"port": port, "protocol": "TCP"}]}
        values = {"settings": {"otel": {"endpoint": endpoint}}}
        cases.append((values, [DNS, to_collector]))
        cases.append(({**values, "networkPolicy": {"egress": [other]}}, [DNS, to_collector, other]))
    for values, expected in cases:
        policy = {"enabled": True, **values.get("networkPolicy", {})}
        spec = objects({**REQUIRED, **values, "networkPolicy": policy})["NetworkPolicy"]["spec"]
        egress = spec.get("egress", []) if "Egress" in spec["policyTypes"] else None
        assert egress == expected, f"{values}: {egress} instead of {expected}"


def check_init_container():
    """models.init may have mounts and a security context of its own."""
    mount = {"name": "secrets", "mountPath": "/config/rclone"}
    security = {"readOnlyRootFilesystem": False}
    init = {"name": "copy", "image": "registry.example/rclone:1.70", "volumeMounts": [mount], "securityContext": security}
    pod = objects({**REQUIRED, "models": {"init": init}})["Deployment"]["spec"]["template"]["spec"]
    models = {"name": "models", "mountPath": "/models"}
    expected = {**init, "name": "models", "volumeMounts": [models, mount]}
    assert pod["initContainers"] == [expected], pod["initContainers"]


def check_rules():
    """The chart, also as a package, has the rules of deploy/prometheus, less those that the values leave out."""
    # The chart has a copy, because a package has no files from outside, and links do not survive every copy.
    copy = CHART / "files" / RULES.name
    assert copy.read_bytes() == RULES.read_bytes(), f"{copy} differs: cp {RULES} {copy}"
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = sum("alert" in rule for group in groups for rule in group["rules"])
    with tempfile.TemporaryDirectory() as folder:
        for path in [CHART, package(CHART, destination=folder)]:
            values = {**REQUIRED, "prometheusRule": {"enabled": True}}
            assert objects(values, path)["PrometheusRule"]["spec"]["groups"] == groups, f"{path}: other rules"
            values["prometheusRule"]["without"] = ["FlechetteSlow"]
            kept = objects(values, path)["PrometheusRule"]["spec"]["groups"]
            kept = [rule["alert"] for group in kept for rule in group["rules"] if "alert" in rule]
            assert len(kept) == alerts - 1 and "FlechetteSlow" not in kept, kept


def check_case(case, values):
    found = objects(values)
    # The schemas of Kubernetes do not have objects of operators.
    known = [document for document in found.values() if not document["apiVersion"].startswith("monitoring.coreos.com/")]
    for document in known:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    check_settings(found, values)
    check_tls(found, values)
    check_ports(found)
    check_disruption_budget(found, values)
    security = found["Deployment"]["spec"]["template"]["spec"]["securityContext"]
    # Without it, Kubernetes visits every file of a volume at each start of a pod.
    assert security["fsGroupChangePolicy"] == "OnRootMismatch", security
    # A program without the cargo feature `otel` refuses those settings.
    if "otel" not in values.get("settings", {}):
        Path(sys.argv[1], f"{case.replace(' ', '-')}.toml").write_text(settings(found))
    print(f"{case}: {len(found)} objects, {len(known)} checked for Kubernetes {', '.join(VERSIONS)}")


def main():
    report = lint(CHART, REQUIRED, strict=True)
    problems = [message for message in report["messages"] if message["severity"] > 1]
    assert not problems and not report["errors"], report
    for case, values in CASES.items():
        check_case(case, values)
    check_network_policies()
    check_init_container()
    check_rules()
    for values, words in REFUSED:
        try:
            objects(values)
        except HelmError as error:
            assert words in str(error), f"{values}: {error}"
        else:
            raise AssertionError(f"not refused: {values}")


main()
