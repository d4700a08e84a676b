//! A bare tonic server that refuses every Predict call, for what a refusal costs there.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Command, Stdio};

use anyhow::Context;
use tonic::Status;

use super::bare::Bare;
use super::harness::program::{Running, on_core, processor_seconds};

/// The server as a child process on core 0.
pub struct Refusing {
    process: Running,
    pub address: SocketAddr,
}

impl Refusing {
    /// Starts it. It describes the models that the server at `of` serves.
    pub fn start(of: SocketAddr) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--refuse-as", &of.to_string()]);
        let child = on_core(0, &command).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut process = Running(child);
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().context("stdout")?).read_line(&mut line)?;
        let address = line.trim().strip_prefix("grpc=").context("the address of the refusing server")?;
        Ok(Self { process, address: address.parse()? })
    }

    /// Processor time of a refusal, in seconds. `load` sends requests, and returns how many.
    pub fn seconds_of_a_refusal(&self, load: impl FnOnce() -> anyhow::Result<f64>) -> anyhow::Result<f64> {
        let process = self.process.0.id();
        let before = processor_seconds(process)?;
        let sent = load()?;
        anyhow::ensure!(sent > 0.0, "no request was sent");
        Ok((processor_seconds(process)? - before) / sent)
    }
}

/// In the child process: serves until standard input ends.
pub fn serve(of: String) -> anyhow::Result<()> {
    let predict = |_| Err(Status::resource_exhausted("a server that only refuses"));
    Bare { predict, described: Some(of) }.serve()
}
