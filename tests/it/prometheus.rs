//! A real Prometheus that scrapes live servers with the configuration and the rules of `deploy/prometheus/`.

use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::program::Background;
use crate::readme::free_port;
use crate::skip::skip;
use crate::switching::wait;

/// The files of `deploy/prometheus/`.
pub const CONFIG: &str = include_str!("../../deploy/prometheus/prometheus.yml");
pub const RULES: &str = include_str!("../../deploy/prometheus/flechette.rules.yml");

/// A running Prometheus.
pub struct Prometheus {
    _process: Background,
    url: String,
    _dir: tempfile::TempDir,
}

/// A series, as `name{label="value", ...}`.
pub struct Series(String);

impl Series {
    pub fn label(&self, name: &str) -> Option<&str> {
        self.0.split_once(&format!("{name}=\""))?.1.split_once('"').map(|(value, _)| value)
    }
}

/// The rules with seconds for minutes, so that time runs sixty times as fast.
pub fn faster(rules: &str) -> String {
    let shorter = |line: &str| match line.trim_start().strip_prefix("for: ") {
        Some(_) => line.replace('m', "s"),
        None => line.replace("m]", "s]").replace("h]", "m]").replace("[1d]", "[24m]"),
    };
    rules.lines().map(|line| shorter(line) + "\n").collect()
}

/// Whether Prometheus is installed. If not, reports the test as skipped.
pub fn is_installed() -> bool {
    let installed = |program| Command::new(program).arg("--version").output().is_ok();
    let installed = ["prometheus", "promtool"].into_iter().all(installed);
    if !installed {
        skip("prometheus is not installed");
    }
    installed
}

/// Replaces a text that must occur once.
pub fn replaced(text: &str, from: &str, to: &str) -> String {
    assert_eq!(text.matches(from).count(), 1, "{from} in {text}");
    text.replace(from, to)
}

impl Prometheus {
    /// Starts a Prometheus that scrapes these HTTP ports; `rules` are [`RULES`], perhaps changed.
    pub fn start(servers: &[SocketAddr], rules: &str) -> Self {
        let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
        let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
        let config =
            replaced(CONFIG, "targets: [127.0.0.1:8002]", &format!("targets: [{}]", servers.join(", ")));
        let file = dir.path().join("prometheus.yml");
        let config = replaced(&config, "scrape_interval: 15s", "scrape_interval: 1s");
        let config = replaced(&config, "evaluation_interval: 15s", "evaluation_interval: 500ms");
        fs::write(&file, config).unwrap();
        fs::write(dir.path().join("flechette.rules.yml"), rules).unwrap();
        let process = Background::start(
            Command::new("prometheus")
                .arg(format!("--config.file={}", file.display()))
                .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
                .arg(format!("--web.listen-address=127.0.0.1:{port}")),
        );
        let this = Self { _process: process, url: format!("http://127.0.0.1:{port}"), _dir: dir };
        // Until it listens, a query is an error.
        wait("Prometheus has scraped every server", || {
            this.query("up").is_ok_and(|series| series.len() == servers.len())
        });
        this
    }

    /// The series that a query returns now, or its error.
    pub fn query(&self, query: &str) -> Result<Vec<Series>, String> {
        let output = Command::new("promtool").args(["query", "instant", &self.url, query]).output().unwrap();
        if !output.status.success() {
            return Err(format!("{query}: {}", String::from_utf8_lossy(&output.stderr)));
        }
        let series = |line: &str| Some(Series(line.rsplit_once(" => ")?.0.to_owned()));
        Ok(String::from_utf8(output.stdout).unwrap().lines().filter_map(series).collect())
    }
}

/// Runs promtool on files of `deploy/prometheus/`, or on this standard input. It must succeed.
pub fn promtool(arguments: &[&str], input: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/prometheus");
    let mut command = Command::new("promtool");
    let command = command.args(arguments).current_dir(folder);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    assert!(output.status.success(), "promtool {arguments:?}: {text}");
}
