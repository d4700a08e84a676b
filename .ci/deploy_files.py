"""Checks the files of deploy/ that start or package the program: compose.yaml, the container file and the Debian
package. Builds nothing: deploy/debian/build runs with a false cargo and the program of the argument."""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
LOCAL_PORT = re.compile(r"127\.0\.0\.1:(\d+)")


def stages():
    """The stages of the container file and their lines."""
    found = {}
    for line in (DEPLOY / "Containerfile").read_text().splitlines():
        if stage := re.fullmatch(r"FROM \S+ AS (\S+)", line):
            lines = found.setdefault(stage[1], [])
        elif found:
            lines.append(line)
    return found


def check_container_file():
    builds = [(lines, line) for lines in stages().values() for line in lines if "cargo build" in line]
    assert len(builds) == 2, builds
    for lines, line in builds:
        # An argument is known only in the stage that declares it.
        declared = 'ARG FEATURES=""' in lines[: lines.index(line)]
        assert declared and '--features "${FEATURES}"' in line, f"the build ignores FEATURES: {line}"


def mounts(service):
    """The files of this machine that a service mounts, and where."""
    for volume in service.get("volumes", []):
        source, target = re.fullmatch(r"(\$\{[^}]*\}|[^:]*):([^:]*)(?::ro)?", volume).groups()
        if not re.fullmatch(r"\w+", source):
            yield source, target


def check_compose():
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for name, service in services.items():
        if build := service.get("build"):
            context = DEPLOY / build["context"]
            assert (context / build["dockerfile"]).samefile(DEPLOY / "Containerfile"), build
            assert build["target"] in stages(), build
        else:
            assert re.fullmatch(r"[\w.]+(/[\w-]+)+:v?[\d.]+", service["image"]), f"{name}: not a version of an image"
        for source, target in mounts(service):
            if source == "${MODELS:-../models}":
                assert (DEPLOY / "..").samefile(ROOT) and target == "/models", target
            else:
                assert source.startswith("./") and (DEPLOY / source).exists(), f"{name}: {source} does not exist"
    option = services["prometheus"]["command"][0]
    config = [
        DEPLOY / source / option.removeprefix(f"--config.file={target}/")
        for source, target in mounts(services["prometheus"])
        if option.startswith(f"--config.file={target}/")
    ]
    assert len(config) == 1 and config[0].is_file(), f"{option}: no such file"
    check_prometheus(services, config[0])
    check_dashboards(services["grafana"])


def check_prometheus(services, path):
    """Prometheus has a network of its own, finds the server by its name, and is set up as outside of containers."""
    for name, service in services.items():
        # Whoever is in the network namespace of another container loses the network when that one restarts.
        assert "network_mode" not in service, f"{name}: {service['network_mode']}"
    config, outside = (yaml.safe_load(file.read_text()) for file in [path, DEPLOY / "prometheus/prometheus.yml"])
    [job], [other] = config["scrape_configs"], outside["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in services and f"127.0.0.1:{port}:{port}" in services[host]["ports"], f"{path}: {target}"
    job["static_configs"], outside_targets = other["static_configs"], other["static_configs"][0]["targets"]
    assert outside_targets == [f"127.0.0.1:{port}"], outside_targets
    assert config == outside, f"{path} differs from prometheus.yml in more than the target"


def check_dashboards(grafana):
    """Grafana reads its dashboards and its source of data where they are mounted."""
    targets = {target: DEPLOY / source for source, target in mounts(grafana)}
    provisioning = targets["/etc/grafana/provisioning"]
    [provider] = yaml.safe_load((provisioning / "dashboards/flechette.yaml").read_text())["providers"]
    assert any(target.startswith(f"{provider['options']['path']}/") for target in targets), provider
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    # The name of the service.
    assert source["url"] == "http://prometheus:9090", source


def check_compose_docs():
    """The documented command and ports are those of the file."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    published = {port for service in services.values() for port in service.get("ports", [])}
    for port in published:
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port), f"{port}: other machines can connect, or another number"
    published = {int(port.rsplit(":", 1)[1]) for port in published}
    page = (ROOT / "docs/operations.md").read_text()
    section = page.split("[`compose.yaml`]", 1)[1].split("\n## ", 1)[0]
    documented = set(map(int, LOCAL_PORT.findall(section)))
    assert documented == published, f"documented: {sorted(documented)}, published: {sorted(published)}"
    for text in [section, COMPOSE.read_text()]:
        # A relative path would be relative to deploy/.
        [models] = re.findall(r"MODELS=(\S+) podman-compose -f deploy/compose.yaml", text)
        assert models.startswith("$PWD/"), f"MODELS={models} is not absolute"


def check_debian_package():
    package = tomllib.loads((ROOT / "Cargo.toml").read_text())["package"]
    deb = package["metadata"]["deb"]
    # The rest of a longer one becomes part of the long description.
    assert len(package["description"]) < 80, "the description is longer than a synopsis"
    assert re.fullmatch(r"[^<>]+ <[^<>@ ]+@[^<>@ ]+>", deb["maintainer"]), deb["maintainer"]
    changelog = (ROOT / deb["changelog"]).read_text()
    first = f"flechette ({package['version']}-1) unstable; urgency=medium\n"
    assert changelog.startswith(first), f"{deb['changelog']} does not begin with {first}"
    assert f"\n -- {deb['maintainer']}  " in changelog, f"{deb['changelog']} has another maintainer"


def check_debian_build(program):
    """deploy/debian/build gives FEATURES to cargo, which here only writes down its arguments."""
    for features in ["", "otel"]:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder)
            cargo = target / "bin/cargo"
            cargo.parent.mkdir()
            cargo.write_text(f'#!/bin/sh\nprintf "<%s>" "$@" >>{target}/calls\necho >>{target}/calls\n')
            cargo.chmod(0o755)
            (target / "release").mkdir()
            (target / "release/flechette").symlink_to(program)
            path = f"{cargo.parent}:{os.environ['PATH']}"
            env = {**os.environ, "PATH": path, "CARGO_TARGET_DIR": folder, "FEATURES": features, "PROFILE": "release"}
            subprocess.run([DEPLOY / "debian/build"], env=env, check=True, stdout=subprocess.DEVNULL)
            build, package = (target / "calls").read_text().splitlines()
            assert build.startswith("<build>") and f"<--features><{features}>" in build, build
            assert package.startswith("<deb>") and "<--no-build>" in package, package


check_container_file()
check_compose()
check_compose_docs()
check_debian_package()
check_debian_build(Path(sys.argv[1]).absolute())
print("compose file, container file and Debian package: in order")
