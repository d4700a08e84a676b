"""Values of the Helm chart, for `deploy_chart.py`."""

IMAGE = {"repository": "registry.example/flechette"}
REQUIRED = {"image": IMAGE, "models": {"claim": "models"}}
MODELS = {
    "watch_seconds": 2,
    "ctr": {
        "versions": [3, 5],
        "labels": {"stable": 3, "canary": "latest"},
        "canary_share": 0.05,
        "sticky": "feature:user",
        "shadow": "canary",
        "shadow_share": 1,
        "batcher": {"max_samples": 8192, "workers": 4},
    },
    "a model.2": {"versions": "latest 2"},
}
EVERYTHING = {
    "image": IMAGE,
    "imagePullSecrets": [{"name": "registry"}],
    "models": {"init": {"image": "registry.example/rclone:1.70", "args": ["copy", "bucket:models", "/models"]}},
    "settings": {
        "tls": {"http": "on", "certificate": "/secrets/a.pem", "key": "/secrets/a.key"},
        "cache": {"mode": "on", "fraction": 0.05},
        "server": {"drain_seconds": 5},
        "models": MODELS,
    },
    "secret": "flechette",
    "env": [{"name": "FLECHETTE_LOG_LEVEL", "value": "debug"}],
    "autoscaling": {"enabled": True},
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "authorization": {"name": "a", "key": "b"},
        "tlsConfig": {"ca": {"secret": {"name": "flechette", "key": "ca.pem"}}},
    },
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
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
MONITORED = {**REQUIRED, "serviceMonitor": {"enabled": True}}
CERTIFICATE = {"certificate": "/secrets/a.pem", "key": "/secrets/a.key"}
CASES = {
    "required values only": REQUIRED,
    "every value": EVERYTHING,
    "a least number of pods": {**REQUIRED, "disruptionBudget": {"minAvailable": 0}},
    "a GPU and no limit of memory": {**REQUIRED, "gpus": 1, "resources": {"limits": {"memory": None}}},
    "other ports": {**REQUIRED, "settings": {"server": {"grpc": "[::]:9001", "http": "0.0.0.0:9002"}}},
    "a network policy without an init container": {**REQUIRED, "networkPolicy": {"enabled": True}},
    "spans": {
        **REQUIRED,
        "settings": {"otel": {"endpoint": "http://collector:4317", "sample_ratio": 0.5}},
        "networkPolicy": {"enabled": True, "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]},
    },
    "a monitor without TLS": MONITORED,
    "a monitor with TLS on gRPC only": {**MONITORED, "settings": {"tls": CERTIFICATE}},
    "a monitor with another name": {
        **MONITORED,
        "settings": {"tls": {**CERTIFICATE, "http": "on"}},
        "serviceMonitor": {"enabled": True, "tlsConfig": {"serverName": "ctr.example", "insecureSkipVerify": True}},
    },
}
# Values that must be refused, and words of the error.
REFUSED = [
    ({}, "minLength"),
    ({"image": IMAGE}, "models.claim or models.init"),
    ({"image": IMAGE, "models": {"claim": "a", "init": {"image": "b"}}}, "cannot write to models.claim"),
    ({**REQUIRED, "settings": {"server": {"grpc": "0.0.0.0"}}}, "grpc"),
    ({**REQUIRED, "replica": 3}, "replica"),
    ({**REQUIRED, "settings": {"server": {"drain_seconds": "soon"}}}, "drain_seconds"),
    # YAML reads `on` without quotes as a boolean.
    ({**REQUIRED, "settings": {"tls": {"http": True}}}, "one of 'on', 'off'"),
    ({**MONITORED, "serviceMonitor": {"tlsConfig": {"serverNames": "a"}}}, "serverNames"),
]
