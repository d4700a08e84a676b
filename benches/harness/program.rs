//! The program as a child process.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use anyhow::Context;

/// How long an answer over HTTP may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// The unit of the times in `/proc/PID/stat`: `USER_HZ` is 100 on every architecture of Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// The program with a command line.
pub fn program(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flechette"));
    command.args(line.split_whitespace());
    command
}

/// The same command on one core, by `taskset`.
pub fn on_core(core: usize, command: &Command) -> Command {
    let mut pinned = Command::new("taskset");
    pinned.args(["-c", &core.to_string()]).arg(command.get_program()).args(command.get_args());
    pinned
}

/// The program with a command line, on one core if `taskset` is there.
pub fn pinned(core: usize, line: &str) -> Command {
    let there = Command::new("taskset").arg("-V").output().is_ok_and(|output| output.status.success());
    let program = program(line);
    if there { on_core(core, &program) } else { program }
}

/// Runs a command to its end. Returns what it prints.
pub fn output(mut command: Command) -> anyhow::Result<Vec<u8>> {
    let output = command.output()?;
    anyhow::ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(output.stdout)
}

/// A child process, killed when dropped.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A `serve` that has loaded a model.
pub struct Serving {
    pub process: Running,
    pub grpc: SocketAddr,
    pub http: SocketAddr,
    /// The rest of the log. Somebody must read it, because the pipe must not fill.
    pub log: Lines<BufReader<ChildStderr>>,
}

impl Serving {
    /// Starts a command line of `serve`, and waits until a model is served.
    pub fn start(mut command: Command) -> anyhow::Result<Self> {
        let mut process = Running(command.stderr(Stdio::piped()).spawn()?);
        let mut log = BufReader::new(process.0.stderr.take().context("stderr")?).lines();
        let mut read = String::new();
        let addresses = |read: &str| {
            let address = |key| read.split_once(key)?.1.split([' ', '\n']).next()?.parse().ok();
            Some((address("grpc=")?, address("http=")?))
        };
        loop {
            if let Some((grpc, http)) = addresses(&read).filter(|_| read.contains(": loaded ")) {
                return Ok(Self { process, grpc, http, log });
            }
            let line = log.next().with_context(|| format!("serve has ended: {read}"))??;
            read = read + &line + "\n";
        }
    }
}

/// The body of a page that a server answers over HTTP.
pub fn get(address: SocketAddr, path: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no end of the header")?;
    anyhow::ensure!(head.starts_with("HTTP/1.1 200"), "{path}: {head}");
    Ok(body.to_owned())
}

/// User and system time of a process so far.
pub fn processor_seconds(process: u32) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name may have spaces. After it come the state and 10 numbers, then user and system time.
    let fields: Vec<&str> = stat.rsplit(')').next().context("stat")?.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).context("stat");
    Ok((ticks(11)? + ticks(12)?) / TICKS_PER_SECOND)
}
