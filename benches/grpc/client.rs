//! `h2load`, which sends one message again and again, and measures each answer.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use anyhow::Context;

use super::harness::Sorted;
use super::harness::program::on_core;

const CONNECTIONS: usize = 4;

/// How a window loads a server.
pub struct Load<'a> {
    /// Requests in flight on each connection.
    pub streams: usize,
    pub seconds: usize,
    /// For files of the client.
    pub dir: &'a Path,
}

/// What a window has measured.
pub struct Window {
    /// Requests per second.
    pub rate: f64,
    /// The answers within the window.
    pub answers: u64,
    /// p50, p99 and p99.9 of the times of answers, in microseconds.
    pub micros: [f64; 3],
}

impl Load<'_> {
    /// Sends a framed message to a method until the window is over, after a second of warming up.
    pub fn run(&self, server: SocketAddr, method: &str, message: &[u8]) -> anyhow::Result<Window> {
        let (body, log) = (self.dir.join("body"), self.dir.join("answers.log"));
        std::fs::write(&body, message)?;
        let _ = std::fs::remove_file(&log);
        let mut command = Command::new("h2load");
        command.args(["-t", "1", "--warm-up-time", "1"]);
        command.args(["-c", &CONNECTIONS.to_string(), "-m", &self.streams.to_string()]);
        command.args(["-D", &self.seconds.to_string()]);
        command.arg("-d").arg(&body).arg("--log-file").arg(&log);
        command.args(["-H", "content-type: application/grpc", "-H", "te: trailers"]);
        command.arg(format!("http://{server}/{method}"));
        let output = on_core(1, &command)
            .output()
            .context("taskset and h2load (Debian: nghttp2-client) are needed")?;
        let text = String::from_utf8_lossy(&output.stdout);
        anyhow::ensure!(output.status.success(), "h2load: {text}{}", String::from_utf8_lossy(&output.stderr));
        let times = times(&log, &text)?;
        let answers = times.len() as u64;
        let micros = Sorted::of(times.into_iter());
        let rate = text.lines().find_map(|line| line.strip_prefix("finished in ")?.split(", ").nth(1));
        let rate = rate.and_then(|rate| rate.strip_suffix(" req/s")?.parse().ok());
        Ok(Window {
            rate: rate.with_context(|| format!("h2load: no rate: {text}"))?,
            answers,
            micros: [0.5, 0.99, 0.999].map(|share| micros.at(share)),
        })
    }
}

/// The time of each answer: the third field of each line of the log. The second is the HTTP status.
fn times(log: &Path, text: &str) -> anyhow::Result<Vec<f64>> {
    let lines = std::fs::read_to_string(log)?;
    let times: Option<Vec<f64>> = lines
        .lines()
        .map(|line| match line.split('\t').collect::<Vec<_>>()[..] {
            [_, "200", micros] => micros.parse().ok(),
            _ => None,
        })
        .collect();
    times.filter(|times| !times.is_empty()).with_context(|| format!("h2load: a request has failed: {text}"))
}
